"""Queued work is done, also while the process ends."""

from __future__ import annotations

import subprocess
import sys

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
