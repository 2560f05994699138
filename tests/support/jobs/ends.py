"""A small training script that saves and ends as its environment requests.

Run by tests/integration, never imported. Environment:
    TRACE_DIR   where the rank appends its trace (JSON lines, `rank_<r>.jsonl`)
    SWAP        put our functions where Megatron's `training.py` has imported its own, without the
                launcher
    OLD_LOOP    with SWAP: leave `maybe_finalize_async_save` as it is, as in a release without it
    END         actions of the script after `pretrain`: `fork` (a child that calls `sys.exit`, and
                for which the script waits); then, or alone, `exit N`, `raise N` (SystemExit) or
                `fail` (an exception)
    STORE_GONE  after the training loop, the script closes its checkpointers, and the job's
                rendezvous store no longer answers
    WAITS       one wait per save, or `-`: the call is made inside `megatron_flashckpt.waiting`

Traced: per save, whether it was copied and committed when the call returned; per iteration, the
results of saves that the log had reported when the iteration's forward began.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
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
    from megatron_flashckpt.megatron_lm import compat
    from megatron_flashckpt.save import entry_points

    training.save_checkpoint = checkpointing.save_checkpoint
    training.load_checkpoint = checkpointing.load_checkpoint
    if "OLD_LOOP" in os.environ:
        compat.has_async_utils = checkpointing.has_async_utils = lambda: False
        entry_points.has_async_utils = lambda: False
        entry_points.watch()
    else:
        training.maybe_finalize_async_save = async_utils.maybe_finalize_async_save


def lose_store_after_training() -> None:
    """Make the store fail as if torchrun, which serves it, had been killed.

    The last save needs a new checkpointer, which cannot use the store.
    """
    import torch.distributed as dist

    from megatron_flashckpt.save.session import session

    class UnreachableStore:
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("connection closed")

    train = training.train

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = train(*args, **kwargs)
        session.close(leave=True)
        dist.distributed_c10d._get_default_store = UnreachableStore
        return result

    training.train = wrapper


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


def traced_step(forward_step: Any) -> Any:
    """Trace the results reported when an iteration began; then wait for the agent's commit."""
    from megatron_flashckpt.save.save_reports import SaveReports

    reported: list[int] = []
    committed = SaveReports.committed

    def note(self: SaveReports, outcome: Any) -> None:
        reported.append(outcome.iteration)
        committed(self, outcome)

    SaveReports.committed = note
    seen: set[int] = set()

    def wrapper(batches: Any, model: Any) -> Any:
        args = get_args()
        iteration = int(args.curr_iteration) + 1
        if iteration not in seen:
            seen.add(iteration)
            trace(event="forward", iteration=iteration, told=list(reported))
            deadline = time.monotonic() + 60
            while iteration > args.save_interval and not is_committed(args.save_interval):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            if iteration > args.save_interval and not reported:
                # The manifest exists, and the agent is about to report the result.
                time.sleep(0.5)
        return forward_step(batches, model)

    return wrapper


def end() -> None:
    how, _, status = os.environ.get("END", "").partition(" ")
    if how == "fork":
        child = os.fork()
        if child == 0:
            sys.exit(0)
        trace(event="child", status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        how, _, status = status.partition(" ")
    if how == "exit":
        sys.exit(int(status))
    if how == "raise":
        raise SystemExit(int(status))
    if how == "fail":
        raise RuntimeError("the script failed")


if __name__ == "__main__":
    if "SWAP" in os.environ:
        swap()
    if "STORE_GONE" in os.environ:
        lose_store_after_training()
    step = tiny.forward_step
    if WAITS:
        hold_copies()
        training.save_checkpoint = traced_save(training.save_checkpoint)
    if "OLD_LOOP" in os.environ:
        step = traced_step(step)
    tiny.train(tiny.datasets_provider, tiny.model_provider, step)
    end()
