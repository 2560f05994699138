"""How long the training loop waits for a save, measured around all that Megatron does for one.

Megatron calls `save_checkpoint` from `save_checkpoint_and_time`, which stops timers before and
behind it: each synchronizes the GPU and, until core 0.19, all ranks. Training pays for these too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from megatron_flashckpt.tracing import Recorder

#: Called with seconds, and with where they were measured.
Announce = Callable[[float, str], None]


class LoopTimer:
    """Measures one call at a time. Used on the training thread."""

    def __init__(self) -> None:
        self.is_running = False
        self._staged: tuple[Recorder, Announce] | None = None

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measure what is done inside the context, and announce the save that was staged in it."""
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
        """Announce a staged save: at once with `call_s`, or when the measured call returns."""
        if self.is_running:
            self._staged = recorder, announce
        else:
            announce(call_s, "in save_checkpoint")
