"""Facts about a process from `/proc`, and the end of a process with its descendants."""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

MIB = 2**20


def open_files(pid: int | str = "self") -> list[str]:
    """Return the targets of the open descriptors of a process."""
    targets = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed after the listing
            targets.append(os.readlink(path))
    return targets


@contextlib.contextmanager
def nothing_left_open() -> Iterator[None]:
    """Assert that this process keeps no descriptor open that it has opened in the block.

    What earlier tests have left open may be closed in the meantime, by the garbage collector or by
    a thread, so the number of descriptors proves nothing.
    """
    before = collections.Counter(open_files())
    yield
    assert collections.Counter(open_files()) - before == collections.Counter()


def slabs_of(pid: int | str) -> list[int]:
    """Return the inodes of slabs that a process has open or mapped; a slab counts once for both."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    inodes = [int(line.split()[4]) for line in maps if "memfd:flashckpt-" in line]
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "memfd:flashckpt-" in os.readlink(path):
                inodes.append(path.stat().st_ino)
    return inodes


def times_mapped(name: str) -> int:
    """Return the number of mappings of the slab that was created as `name`."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"/memfd:flashckpt-{name} " in line for line in maps)


def sockets_of(pid: int | str) -> list[str]:
    return [target for target in open_files(pid) if target.startswith("socket:")]


def status_of(pid: int | str, field: str) -> str:
    """Return a field of `/proc/PID/status`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return line.split()[1]
    raise AssertionError(f"process {pid} has no {field}")


def memory_nbytes(pid: int, field: str = "VmRSS") -> int:
    """Return the resident memory of a process in bytes, or a part of it."""
    return int(status_of(pid, field)) * 1024


def thread_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def end(process: subprocess.Popen[Any]) -> None:
    """Kill the remaining processes of a job: torchrun and its ranks."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def run_within(
    timeout_s: float, command: list[str], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `command` and return its output; if it is late, kill it and its descendants.

    Ranks have process groups of their own.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            end(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def at_rest(count: Callable[[], int], within_s: float = 0.5) -> int:
    """Return the lowest count within a while: an agent tidies after it reports a result."""
    counts, deadline = [count()], time.monotonic() + within_s
    while time.monotonic() < deadline:
        time.sleep(0.01)
        counts.append(count())
    return min(counts)
