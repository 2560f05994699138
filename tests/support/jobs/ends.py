"""A small training script that saves and ends as its environment requests.

Run by tests/integration, never imported. Environment:
    TRACE_DIR   where the rank appends its trace (JSON lines, `rank_<r>.jsonl`)
    SWAP        put our functions where Megatron's `training.py` has imported its own, without the
                launcher
    END         the exit status with which the script ends; before, it forks a child that calls
                `sys.exit`, and waits for it
    WAITS       one wait per save, or `-`: the call is made inside `megatron_flashckpt.waiting`

Traced: per save, whether it was copied and committed when the call returned.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

import megatron.training.training as training
from megatron.training import get_args

import megatron_flashckpt
from scripts import pretrain_gpt_tiny as tiny
from tests.support.jobs.traces import trace

WAITS = os.environ.get("WAITS", "").split()
#: Late copies of a save wait for this event, at most for a minute.
copies_may_go_on = threading.Event()


def is_committed(iteration: int) -> bool:
    return any((Path(get_args().save) / f"iter_{iteration:07d}").glob("*.end"))


def swap() -> None:
    from megatron_flashckpt import async_utils, checkpointing

    training.save_checkpoint = checkpointing.save_checkpoint
    training.load_checkpoint = checkpointing.load_checkpoint
    training.maybe_finalize_async_save = async_utils.maybe_finalize_async_save


def hold_copies() -> None:
    """Delay late copies until the call of the save has returned."""
    from megatron_flashckpt.save.stager import Stager

    copy_late = Stager._copy_late

    def held(self: Stager, job: Any) -> None:
        if job.copies:
            copies_may_go_on.wait(60)
        copy_late(self, job)

    Stager._copy_late = held


def traced_save(save: Any) -> Any:
    from megatron_flashckpt.save.session import session

    waits = iter(WAITS)

    def wrapper(iteration: int, *args: Any, **kwargs: Any) -> None:
        wait = next(waits, "-")
        context = contextlib.nullcontext() if wait == "-" else megatron_flashckpt.waiting(wait)
        copies_may_go_on.clear()
        if wait == "durable":
            copies_may_go_on.set()
        with context:
            save(iteration, *args, **kwargs)
        job = session.checkpointer(get_args().save).link.stager._current
        copied = job is None or job.copied.is_set()
        trace(event="save", iteration=iteration, copied=copied, committed=is_committed(iteration))
        copies_may_go_on.set()

    return wrapper


if __name__ == "__main__":
    if "SWAP" in os.environ:
        swap()
    if WAITS:
        hold_copies()
        training.save_checkpoint = traced_save(training.save_checkpoint)
    tiny.train(tiny.datasets_provider, tiny.model_provider, tiny.forward_step)
    if "END" in os.environ:
        if (child := os.fork()) == 0:
            sys.exit(0)
        trace(event="child", status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if status := int(os.environ["END"]):
            sys.exit(status)
