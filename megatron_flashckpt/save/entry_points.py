"""Where a training loop enters that calls nothing of ours before its first step.

The phases of `Startup` run as early as the way in allows: at a load, if there is one; else before
the first training step, whose function is replaced for that. The launcher replaces it at once. If
only imports were swapped, the first `maybe_finalize_async_save` does, right before that step; or,
in releases before core 0.7, which have no such call, what Megatron calls in its place.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_flashckpt.megatron_lm import stock
from megatron_flashckpt.megatron_lm.compat import exists, has_async_utils
from megatron_flashckpt.megatron_lm.job_flags import captures_graphs
from megatron_flashckpt.save.session import session

#: What Megatron's `train` calls before every step, in every release.
_BEFORE_STEP = "update_num_microbatches"


def watch() -> None:
    """Replace `train_step`, so that the phases come before the first step without a load, too."""
    training = stock.loaded("training")
    if training is None or stock.is_replaced("training", "train_step"):
        return
    stock.replace("training", "train_step", train_step)
    if hasattr(training, "save_checkpoint_and_time"):
        stock.replace("training", "save_checkpoint_and_time", save_checkpoint_and_time)


def watch_from_import() -> None:
    """Have `watch` called before the first step where only imports were swapped; for old releases.

    Releases without `async_utils` call nothing of ours before a step, unless there is a load. Their
    `training` imports us while it is being imported itself, and has by then what it calls before
    a step.
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
    """Call Megatron's own function, and measure how long the training loop waits for it."""
    with session.loop_timer.measure():
        return stock.original("training", "save_checkpoint_and_time")(*args, **kwargs)


def train_step(*args: Any, **kwargs: Any) -> Any:
    """Do what Megatron's own `train_step` does; get ready before the first one, dry-run after it.

    In releases whose loop does not ask for the outcomes of saves, ask for them before every step.

    Raises:
        UnsupportedError: as `Startup.prepare`; or the first step made state that cannot be saved.
        SaveFailedError: as `maybe_finalize_async_save`, in releases that do not have it.
    """
    step = stock.original("training", "train_step")
    margs = stock.checkpointing().get_args()
    if not _asks_every_iteration():
        session.finalize(blocking=False)
    if not margs.save or session.is_ready(margs.save):
        return step(*args, **kwargs)
    named = stock.bind(step, args, kwargs)
    startup = session.startup(margs.save)
    startup.prepare(named["model"], named["optimizer"])
    if captures_graphs(margs):
        # Calls of other threads can break a capture. The copy thread's cannot; page-locking and
        # the making of streams end before the first capture.
        startup.checkpointer.link.wait_for_device_work()
    result = step(*args, **kwargs)
    if startup.dry_run(named["model"], named["optimizer"]):
        session.note_ready(margs.save)
    return result


@functools.cache
def _asks_every_iteration() -> bool:
    """Return whether Megatron's loop calls `maybe_finalize_async_save` in every iteration."""
    return has_async_utils()
