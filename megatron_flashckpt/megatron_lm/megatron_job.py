"""The data of a job of Megatron's own training loop, taken from Megatron's args."""

from __future__ import annotations

from typing import Any

from megatron_flashckpt.megatron_lm import compat, stock
from megatron_flashckpt.megatron_lm.job_description import fact, facts
from megatron_flashckpt.megatron_lm.job_flags import changes_outside_steps
from megatron_flashckpt.megatron_lm.job_state import JobState


def job_of(
    args: Any,
    model: list[Any],
    optimizer: Any,
    scheduler: Any = None,
    floating_point_operations: Any = 0,
) -> JobState:
    """Return the data of the job that trains `model`.

    Args:
        floating_point_operations: counted by the training loop since the start of training.
    """
    return JobState(
        chunks=stock.unwrap(model),
        wrapped=model,
        optimizer=optimizer,
        saves_optimizer=not getattr(args, "no_save_optim", False),
        scheduler=scheduler,
        common={"args": args, "num_floating_point_operations_so_far": floating_point_operations},
        description=facts(args),
        save_rng=not getattr(args, "no_save_rng", False),
        trains=not getattr(args, "skip_train", False),
        save_interval=getattr(args, "save_interval", None),
        memory_interval=getattr(args, "non_persistent_save_interval", None),
        retain_interval=fact(args, "save_retain_interval"),
        outside_steps=changes_outside_steps(args),
        entry_point=stock.entry_point(),
        differences=lambda: compat.missing(args),
    )
