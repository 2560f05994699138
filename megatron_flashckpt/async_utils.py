"""SHIM: the names of `megatron.training.async_utils`.

Swap the import in `megatron/training/training.py`:

    from megatron_flashckpt.async_utils import maybe_finalize_async_save

All other names are those of Megatron's own module.
"""

from __future__ import annotations

from typing import Any

from megatron_flashckpt.megatron_lm.stock import argument, get_args, original, stock_module
from megatron_flashckpt.save import entry_points
from megatron_flashckpt.save.session import session

#: Arguments of the replaced function. Old releases have no `terminate`.
_ARGUMENTS = ("blocking", "terminate")


def maybe_finalize_async_save(*args: Any, **kwargs: Any) -> None:
    """Report committed and failed saves. All ranks call it once per iteration and at the end.

    `blocking=True` waits for all saves. `terminate=True` ends the job and also frees the agent's
    memory, except if Megatron will save once more: its loop ends before its last save. The function
    also finalizes Megatron's own asynchronous saves.

    Raises:
        SaveFailedError: a save failed, and `on_failure`, `failures_in_a_row` or
            `stop_on_failed_first_save` stops training.
    """
    stock = original("async_utils", "maybe_finalize_async_save")
    blocking, last = (bool(argument(stock, name, args, kwargs)) for name in _ARGUMENTS)
    margs = get_args()
    if not last and entry_points.saves(margs):
        entry_points.watch()
        session.checkpointer(margs.save).start_run()
    session.finalize(blocking=blocking, last=last)
    if last and not session.expects_save():
        session.close(leave=True)
    stock(*args, **kwargs)


def __getattr__(name: str) -> Any:
    return getattr(stock_module("async_utils"), name)


entry_points.watch_from_import()
