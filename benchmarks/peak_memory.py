"""Peak memory of a function call."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def with_peak_mb(work: Callable[[], T]) -> tuple[T, float]:
    """Return `work()`, and the peak growth of this process's resident memory during it, in MB.

    Linux only: proc_pid_clear_refs(5) resets the peak.
    """
    gc.collect()
    # `work` would use free memory of the allocator first, which would not count as growth.
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
