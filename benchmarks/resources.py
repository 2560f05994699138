"""Resources of the machine that a benchmark uses: CPU time and memory of processes, and disk."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import psutil

from tests.support.processes import MIB, memory_nbytes

T = TypeVar("T")
#: Size of `O_DIRECT` writes.
_WRITE_NBYTES = 16 << 20
_PAGE = 4096


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def own_mib(pid: int) -> float:
    """Return the private memory of a process, MiB."""
    return memory_nbytes(pid, "RssAnon") / MIB


class ProcessTree:
    """This process, its descendants, and other processes that work for it.

    Args:
        outside: returns the ids of the other processes.
    """

    def __init__(self, outside: Callable[[], set[int]]) -> None:
        self._own = psutil.Process()
        self._outside = outside

    def _others(self) -> list[psutil.Process]:
        processes = {process.pid: process for process in self._own.children(recursive=True)}
        for pid in self._outside() - processes.keys():
            with contextlib.suppress(psutil.NoSuchProcess):
                processes[pid] = psutil.Process(pid)
        return list(processes.values())

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes so far, including ended descendants."""
        own = self._own.cpu_times()
        used = own.user + own.system + own.children_user + own.children_system
        for process in self._others():
            with contextlib.suppress(psutil.Error):
                used += cpu_s(process.pid)
        return used

    def memory_nbytes(self) -> int:
        """Return the memory of all processes; shared memory counts once."""
        return sum(map(_pss, [self._own, *self._others()]))

    def outside_nbytes(self) -> int:
        """Return the private memory of the processes outside."""
        nbytes = 0
        for pid in self._outside():
            with contextlib.suppress(psutil.Error):
                nbytes += psutil.Process(pid).memory_full_info().uss
        return nbytes


def _pss(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


class Peak:
    """Context that measures the peak growth of a value, which it reads again and again."""

    def __init__(self, read: Callable[[], float], every_s: float) -> None:
        self.growth = 0.0
        self._read, self._every_s = read, every_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._before = self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self._every_s):
            self.growth = max(self.growth, self._read() - self._before)


def fsync(paths: Iterable[Path], *, drop: bool = False) -> None:
    """Make the files durable; with `drop`, drop them from the page cache, too.

    Files that are missing by now are left out: an agent replaces its sign of life all the time.
    """
    for path in paths:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            os.fsync(file.fileno())
            if drop:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def drop_from_cache(paths: Iterable[Path]) -> None:
    fsync(paths, drop=True)


def write_raw(path: Path, source: memoryview, *, direct: bool) -> float:
    """Write `source`, which begins at a page border, and make it durable; return the seconds.

    The space is reserved first, as for checkpoints. With `direct`, an incomplete page at the end is
    left out.
    """
    view = source[: len(source) // _PAGE * _PAGE] if direct else source
    flags = os.O_CREAT | os.O_WRONLY | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags, 0o600)
    try:
        started = time.perf_counter()
        os.posix_fallocate(fd, 0, len(view))
        position = 0
        while position < len(view):
            position += os.pwrite(fd, view[position : position + _WRITE_NBYTES], position)
        os.fdatasync(fd)
        return time.perf_counter() - started
    finally:
        os.close(fd)
