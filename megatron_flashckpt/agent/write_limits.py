"""How bytes go from the memory of a node to storage, and what that leaves to training."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time


class Pace:
    """Lets bytes pass at no more than a rate; shared by all threads that write."""

    def __init__(self, mib_per_s: float | None = None) -> None:
        self.limit(mib_per_s)
        self._lock = threading.Lock()
        self._lifted = threading.Event()
        #: When all bytes that have been let pass will have taken their time.
        self._free_at = 0.0

    def limit(self, mib_per_s: float | None) -> None:
        """Let bytes pass at another rate from now on; None: as fast as they come."""
        self._s_per_byte = 0.0 if mib_per_s is None else 1 / (mib_per_s * 2**20)

    def wait(self, nbytes: int) -> None:
        """Return when these bytes may be written."""
        with self._lock:
            start = max(time.monotonic(), self._free_at)
            self._free_at = start + nbytes * self._s_per_byte
        self._lifted.wait(max(0.0, start - time.monotonic()))

    def lift(self) -> None:
        """Hold nothing up any more."""
        self._lifted.set()


@dataclasses.dataclass(frozen=True)
class Flow:
    """How the bytes of each shard go to storage."""

    threads: int = 1
    """Chunks of a shard that are digested and written at the same time."""
    pace: Pace = dataclasses.field(default_factory=Pace)
    """That of all shards of the node together."""


def give_way(nice: int) -> None:
    """Lower the priority of the calling thread, and of those that it will start, by `nice`.

    That of its I/O follows, where the scheduler of the device knows priorities (ioprio_set(2)).
    """
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # training would just not be spared
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
