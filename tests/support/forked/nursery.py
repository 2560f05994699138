"""The process from which ranks are forked, and the first steps of a forked rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
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


def job_environment(where: Path, *first: Path) -> dict[str, str]:
    """Return the environment of a job's ranks, whose agents run in `where`.

    Args:
        first: directories in which Python looks for modules before it looks elsewhere.
    """
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("FLASHCKPT")},
        "PYTHONPATH": os.pathsep.join(map(str, (*first, CPU_MEGATRON, REPO))),
        **COMMON,
        "FLASHCKPT_RUNTIME_DIR": str(where / "run"),
        "FLASHCKPT_AGENT__GRACE_S": "120",  # a slow machine takes long to restart ranks
        "FLASHCKPT_AGENT__KEEP_UNWRITTEN_S": "0",  # no agent outlives its test
    }


class _Popen(popen_forkserver.Popen):
    """A forked process whose exit code several threads may read.

    `Process.start` polls the processes of all threads, and the sentinel holds the exit code for one
    read only. A second thread that reads at the same time would get 255.
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
    """Return the context whose processes have imported Megatron and have no threads."""
    nursery_context = _Context()
    nursery_context.set_forkserver_preload(["tests.support.forked.preload"])
    wanted = {"PYTHONPATH": os.pathsep.join(map(str, (CPU_MEGATRON, REPO))), **COMMON}
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return nursery_context


def call_in_ranks(function: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Call `function(rank, *arguments)` in as many forked processes; raise if one of them fails."""
    from torch.multiprocessing import start_processes  # other users of this module have no torch

    nursery()
    start_processes(function, arguments, ranks, start_method="forkserver")


def settle_in(environment: dict[str, str], log: str, *, afresh: bool = True) -> None:
    """Give this forked process the state of a launched one, in a process group of its own.

    This function imports nothing of megatron_flashckpt, which reads its settings and its failpoint
    on import.

    Args:
        afresh: check that the settings were not read earlier, from another environment.
    """
    # The kernel kills a rank when the tests end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    assert not (afresh and "megatron_flashckpt.save.session" in sys.modules)
    if "FLASHCKPT_FAULT" in environment:
        for name in [name for name in sys.modules if name.startswith("megatron_flashckpt")]:
            del sys.modules[name]
    # Variables that the stand-in for CUDA has set stay.
    for name in [name for name in os.environ if name.startswith("FLASHCKPT")]:
        del os.environ[name]
    os.environ.update(environment)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(fd, stream.fileno())
        # Unbuffered as under `python -u`, which torchrun uses: a killed rank's output is complete.
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
