"""What ranks are forked from, and the first thing that a forked rank does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from multiprocessing import connection, context, forkserver, popen_forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[3]
CPU_MEGATRON = REPO / "tests/cpu_megatron"
#: The environment of every process that imports Megatron here.
COMMON = {
    "OMP_NUM_THREADS": "1",
    "CPU_CUDA_STUBS": "triton apex",
    "PYTHONWARNINGS": "ignore",
}
_PR_SET_PDEATHSIG = 1


class _Popen(popen_forkserver.Popen):
    """A forked process whose exit code several threads may ask for.

    `Process.start` polls the processes of all threads, and the exit code can be read from the
    sentinel only once. A second thread that reads at the same time would get 255.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._reading = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and flag != os.WNOHANG:
            connection.wait([self.sentinel])
        with self._reading:
            return super().poll(os.WNOHANG)


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process: BaseProcess) -> _Popen:  # type: ignore[override]
        return _Popen(process)


class _Context(context.ForkServerContext):
    Process = _Process  # type: ignore[assignment]


def nursery() -> Any:
    """Return the multiprocessing context whose processes have imported Megatron, and no threads."""
    nursery_context = _Context()
    nursery_context.set_forkserver_preload(["tests.support.forked.preload"])
    wanted = {
        "PYTHONPATH": os.pathsep.join(map(str, (CPU_MEGATRON, REPO))),
        **COMMON,
    }
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return nursery_context


def settle_in(environment: dict[str, str], log: str, *, afresh: bool = True) -> None:
    """Make this forked process one as a launcher would have started it, in a group of its own.

    Imports nothing of megatron_flashckpt, which reads its settings, and the fault that is set,
    when it is imported.

    Args:
        afresh: hold that nothing of it was imported before, when its settings were others.
    """
    # No rank outlives the tests, whatever ends those.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    early = [name for name in sys.modules if name.startswith("megatron_flashckpt")]
    assert not (afresh and early), f"imported before the environment was set: {early}"
    # What the stand-in for CUDA has set stays.
    for name in [name for name in os.environ if name.startswith("FLASHCKPT")]:
        del os.environ[name]
    os.environ.update(environment)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(fd, stream.fileno())
        # As with `python -u`, which torchrun uses: a killed rank has said what it said.
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
