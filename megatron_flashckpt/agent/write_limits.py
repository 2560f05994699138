"""Limits of writing from a node's memory to storage, which protect training."""

from __future__ import annotations

import contextlib
import os
import threading
import time


class Flow:
    """Parallelism and rate limit of shards on their way to storage, shared by those of a node."""

    def __init__(self, threads: int = 1, mib_per_s: float | None = None) -> None:
        self.threads = threads
        """Chunks of a shard that are digested and written at the same time."""
        self.limit(mib_per_s)
        self._lock = threading.Lock()
        self._lifted = threading.Event()
        #: Time at which the bytes admitted so far are written, at the limited rate.
        self._free_at = 0.0

    def limit(self, mib_per_s: float | None) -> None:
        """Set the rate; None: no limit."""
        self._s_per_byte = 0.0 if mib_per_s is None else 1 / (mib_per_s * 2**20)

    def wait(self, nbytes: int) -> None:
        """Return when `nbytes` may be written."""
        with self._lock:
            start = max(time.monotonic(), self._free_at)
            self._free_at = start + nbytes * self._s_per_byte
        self._lifted.wait(max(0.0, start - time.monotonic()))

    def lift(self) -> None:
        """End the limit and all waits for it."""
        self._lifted.set()


def lower_priority(nice: int) -> None:
    """Raise the nice value of the calling thread, and of its future threads, by `nice`.

    I/O priority follows where the device's scheduler knows priorities (ioprio_set(2)).
    """
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # only costs training some speed
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
