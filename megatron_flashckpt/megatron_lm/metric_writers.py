"""Megatron's own metric writers: TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_flashckpt.megatron_lm.stock import checkpointing, stock_module


def write_scalars(scalars: Callable[[], dict[str, float]], iteration: int) -> None:
    """Write scalars of `iteration` to Megatron's metric writers, on the rank that has a writer.

    The last rank has one if the job was started with `--tensorboard-dir` or `--wandb-project`.

    Args:
        scalars: called only if there is a writer.
    """
    tensorboard = _writer("get_tensorboard_writer")
    wandb = None if wandb_is_over() else _writer("get_wandb_writer")
    if tensorboard is None and wandb is None:
        return
    values = scalars()
    if tensorboard is not None:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, iteration)
        tensorboard.flush()
    if wandb is not None:
        # Weights & Biases drops steps before the newest one, and training has continued since
        # the save. `curr_iteration` counts from 0 and may have been logged already, hence + 1.
        current = getattr(checkpointing().get_args(), "curr_iteration", None)
        wandb.log(values, max(iteration, 0 if current is None else current + 1))


def wandb_is_over() -> bool:
    """Return whether Megatron's run of Weights & Biases has ended.

    Megatron ends the run before it waits for the last save, so the last save is not logged there.
    """
    wandb = _writer("get_wandb_writer")
    return wandb is not None and getattr(wandb, "run", None) is None


def _writer(getter: str) -> Any:
    """Return a writer; None on ranks without one and in releases without `getter`."""
    return getattr(stock_module("global_vars"), getter, lambda: None)()
