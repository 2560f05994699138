"""Queued work is done, also while the process ends."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from megatron_flashckpt.agent.worker import Worker

AT_EXIT = """
import atexit
from megatron_flashckpt.agent.worker import Worker

worker = Worker("worker", "work failed")
atexit.register(worker.wait, 10.0)
atexit.register(worker.add, lambda: print("done"))
"""


def test_work_is_done_at_the_exit_of_the_process() -> None:
    """Python 3.12 starts no thread then; the ends of failed saves come from a crash."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_without_a_thread_the_caller_goes_on_and_the_work_is_done_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller may hold the agent's lock, for as long as a command of the user takes."""
    done: list[int] = []
    worker = Worker("worker", "work failed")

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        worker.add(lambda: done.append(1))
        assert done == []
    worker.add(lambda: done.append(2))
    worker.close(10.0)
    assert done == [1, 2]
