"""How much memory a step takes at its peak."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def with_peak_mb(work: Callable[[], T]) -> tuple[T, float]:
    """Return `work()`, and the MB by which this process's resident memory grew at most meanwhile.

    Linux only: proc_pid_clear_refs(5) sets the peak back.
    """
    gc.collect()
    # Free memory that the allocator keeps would be taken first, and not be counted.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_mb("VmRSS")
    result = work()
    return result, _resident_mb("VmHWM") - before


def _resident_mb(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise KeyError(name)
