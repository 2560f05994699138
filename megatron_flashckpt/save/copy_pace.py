"""Spaces the parts of a save's copies by the clock, so that training's own work goes between them.

Two facts of GPUs decide. They were measured on an H100 beside steps that call `.item()`:

- The copy engine serves no other stream while one stream has copies enqueued. With two parts
  enqueued at all times, an `.item()` waited for 96 of 100 ms, until the save had no more copies.
- With `CUDA_DEVICE_MAX_CONNECTIONS=1`, which Megatron demands for tensor parallelism, all streams
  share one queue. A part that is enqueued because another one has ended stands behind the kernels
  launched meanwhile: copies ran at 20 instead of 54 GB/s, and the step waited for the rest.

Parts enqueued by the clock, a little slower than the engine copies, avoid both waits. Training then
lost 0 to 4 instead of 65 to 68 ms per save of 5 GiB; an `.item()` waited for 0.04 ms (median).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

import torch

#: Share of time in which parts keep the copy engine busy. Training's own copies use the rest.
BUSY_SHARE = 0.94
#: One of so many full parts is timed: two events cost as much as enqueueing two small copies.
_TIMED_EVERY = 2
#: Timed parts that count. With one connection, kernels may run between a part's events, so the
#: fastest of these parts is taken. More parts would hide for longer that ranks share a bus.
_COUNTED = 3


@dataclasses.dataclass(frozen=True)
class _TimedPart:
    nbytes: int
    begin: torch.cuda.Event
    end: torch.cuda.Event


class CopyPace:
    """Decides when the next part of a save may be enqueued. Used by the copy thread.

    It measures the rate of single parts on the device and keeps it from save to save.
    """

    def __init__(self, part_nbytes: int) -> None:
        """Start without a rate; `part_nbytes` is the size of a full part."""
        self._part_nbytes = part_nbytes
        self._timed: collections.deque[_TimedPart] = collections.deque()
        self._rates: collections.deque[float] = collections.deque(maxlen=_COUNTED)
        self._enqueued = 0
        self._due = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of a single part, from its first byte to its last; None until one was timed."""
        return max(self._rates, default=None)

    def await_turn(self, hurry: threading.Event) -> None:
        """Return when the next part may be enqueued, or at once when `hurry` is set.

        Raises:
            RuntimeError: the GPU has failed.
        """
        self._note_ended()
        if not self._rates and self._timed and not hurry.is_set():
            # Without a rate only one part may be enqueued. This happens once per slab and device.
            self._timed[0].end.synchronize()
            self._note_ended()
        if (delay_s := self._due - time.monotonic()) > 0:
            hurry.wait(delay_s)

    @contextlib.contextmanager
    def part(self, nbytes: int) -> Iterator[None]:
        """Enqueue inside the context a part of `nbytes` bytes on the current stream."""
        begin = timed_event() if self._is_timed(nbytes) else None
        yield
        if begin is not None:
            self._timed.append(_TimedPart(nbytes, begin, timed_event()))
        self._enqueued += 1
        if (rate := self.bytes_per_s) is not None:
            interval_s = nbytes / (BUSY_SHARE * rate)
            # A thread catches up with what it is late, but by no more than a gap: parts that
            # follow each other closely leave no gaps until the engine has caught up with them.
            gap_s = interval_s * (1 - BUSY_SHARE)
            self._due = max(self._due, time.monotonic() - gap_s) + interval_s

    def _is_timed(self, nbytes: int) -> bool:
        # The duration of a small part is not that of its bytes.
        is_full = 2 * nbytes >= self._part_nbytes
        return is_full and (not self._rates or self._enqueued % _TIMED_EVERY == 0)

    def _note_ended(self) -> None:
        while self._timed and self._timed[0].end.query():  # type: ignore[no-untyped-call]
            part = self._timed.popleft()
            seconds = part.begin.elapsed_time(part.end) / 1000
            self._rates.append(part.nbytes / max(seconds, 1e-9))


def timed_event() -> torch.cuda.Event:
    """Record a timed event on the current stream; a thread that waits for the event sleeps."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
