"""Wrappers of Megatron's training functions that run the phases of `Startup` before the first step.

The phases run in the load, if there is one; else in a wrapper around Megatron's `train_step`. The
launcher installs that wrapper at once. If only imports were swapped, the first
`maybe_finalize_async_save` installs it, right before the first step. Releases before core 0.7 lack
that function; there a wrapper of `update_num_microbatches` installs it.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_flashckpt.megatron_lm import stock
from megatron_flashckpt.megatron_lm.compat import exists, has_async_utils
from megatron_flashckpt.megatron_lm.job_flags import captures_graphs, left_to_megatron
from megatron_flashckpt.save.session import session

#: A function that Megatron's `train` calls before every step, in every release.
_BEFORE_STEP = "update_num_microbatches"


def watch() -> None:
    """Replace `train_step`, so that the phases run before the first step even without a load."""
    training = stock.loaded("training")
    if training is None or stock.is_replaced("training", "train_step"):
        return
    stock.replace("training", "train_step", train_step)
    if hasattr(training, "save_checkpoint_and_time"):
        stock.replace("training", "save_checkpoint_and_time", save_checkpoint_and_time)


def watch_from_import() -> None:
    """Have old releases call `watch` before the first step if only imports were swapped.

    Releases without `async_utils` call this package before a step only in a load. Their `training`
    module imports this package while it is itself being imported; `update_num_microbatches` is
    defined in it by then.
    """
    training = stock.loaded("training")
    if training is None or hasattr(training, "train_step") or not hasattr(training, _BEFORE_STEP):
        return
    if not exists(f"{training.__package__}.async_utils"):
        stock.replace("training", _BEFORE_STEP, _watch_and_call)


def _watch_and_call(*args: Any, **kwargs: Any) -> Any:
    watch()
    return stock.original("training", _BEFORE_STEP)(*args, **kwargs)


def save_checkpoint_and_time(*args: Any, **kwargs: Any) -> Any:
    """Call Megatron's own function and measure how long the training loop waits for it."""
    with session.loop_timer.measure():
        return stock.original("training", "save_checkpoint_and_time")(*args, **kwargs)


def train_step(*args: Any, **kwargs: Any) -> Any:
    """Call Megatron's own `train_step`; prepare before the first step and dry-run a save after it.

    In releases whose loop never polls the results of saves, poll them before every step.

    Raises:
        UnsupportedError: as `Startup.prepare`; or the first step made state that cannot be saved.
        SaveFailedError: as `maybe_finalize_async_save`, in releases without that function.
    """
    step = stock.original("training", "train_step")
    margs = stock.checkpointing().get_args()
    if not _polls_every_iteration():
        session.finalize(blocking=False)
    if not margs.save or session.is_ready(margs.save) or left_to_megatron(margs):
        return step(*args, **kwargs)
    arguments = stock.bind(step, args, kwargs)
    startup = session.startup(margs.save)
    startup.prepare(arguments["model"], arguments["optimizer"])
    if captures_graphs(margs):
        # CUDA calls of other threads can break a graph capture; those of the copy thread cannot.
        # So page-locking and the creation of streams must end before the first capture.
        startup.checkpointer.link.wait_for_device_work()
    result = step(*args, **kwargs)
    if startup.dry_run(arguments["model"], arguments["optimizer"]):
        session.note_ready(margs.save)
    return result


@functools.cache
def _polls_every_iteration() -> bool:
    """Return whether Megatron's loop calls `maybe_finalize_async_save` in every iteration."""
    return has_async_utils()
