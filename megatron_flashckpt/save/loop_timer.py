"""Measurement of the training loop's wait for a save, including Megatron's own work for the save.

Megatron calls `save_checkpoint` from `save_checkpoint_and_time`, which stops timers before and
after the call. Each stop synchronizes the GPU and, until core 0.19, all ranks; training waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from megatron_flashckpt.tracing import Recorder


class LoopTimer:
    """Measures one call of `save_checkpoint_and_time` at a time. Used on the training thread."""

    def __init__(self) -> None:
        self.is_running = False
        self._recorder: Recorder | None = None

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the time inside the context for the save that is made in it."""
        started = time.monotonic()
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False
            recorder, self._recorder = self._recorder, None
            if recorder is not None:
                recorder.seen_by_loop(started, time.monotonic() - started)

    def saved(self, recorder: Recorder) -> None:
        """Note the recorder of a save, which gets the measured time if a call is running."""
        if self.is_running:
            self._recorder = recorder
