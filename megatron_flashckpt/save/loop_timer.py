"""Measurement of the training loop's wait for a save, including Megatron's own work for the save.

Megatron calls `save_checkpoint` from `save_checkpoint_and_time`, which stops timers before and
after the call. Each stop synchronizes the GPU and, until core 0.19, all ranks; training waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from megatron_flashckpt.tracing import Recorder

#: Arguments: the seconds, and a phrase that names where they were measured.
Announce = Callable[[float, str], None]


class LoopTimer:
    """Measures one call of `save_checkpoint_and_time` at a time. Used on the training thread."""

    def __init__(self) -> None:
        self.is_running = False
        self._staged: tuple[Recorder, Announce] | None = None

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the time inside the context, then announce the save that was staged in it."""
        started = time.monotonic()
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False
            seconds = time.monotonic() - started
            staged, self._staged = self._staged, None
            if staged is not None:
                recorder, announce = staged
                recorder.seen_by_loop(started, seconds)
                announce(seconds, "as the training loop sees it")

    def staged(self, recorder: Recorder, call_s: float, announce: Announce) -> None:
        """Announce a staged save when the measured call returns, or at once with `call_s`.

        Args:
            call_s: seconds of `save_checkpoint` alone; used if no measured call is running.
        """
        if self.is_running:
            self._staged = recorder, announce
        else:
            announce(call_s, "in save_checkpoint")
