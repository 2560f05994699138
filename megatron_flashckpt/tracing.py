"""Timings of the phases of a save, by the clock that all processes of a node share.

Code marks its phases with `phase`, which costs next to nothing unless a `Recorder` is active in the
thread. This module does not import torch, because trainers and agents use it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import msgspec

from megatron_flashckpt.layout.save_cost import PlanOrigin, RankCost

#: The save on the training thread, from the call to its return.
SAVE = "save"
#: Time that the training loop waits for a save, including Megatron's timers and barriers.
LOOP = "save as the training loop sees it"
#: Wait for copies: inside the save (`staging: blocking`), or before an optimizer step.
WAIT = "wait for copies"

#: Spans per name, at most: a shard of 100 GB has thousands of chunks.
_MOST = 256


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Start and duration of a phase."""

    name: str
    thread: str
    start: float
    """Seconds of `time.monotonic`, a clock that all processes of a node share."""
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


class Recorder:
    """The record of one save on one rank: its phases. Thread-safe.

    The trainer sends the record once, with the "staged" message. Its timings go from there to the
    commit record, the manifest, the history and the result; its phases go to the trace.
    """

    def __init__(self, call: str = SAVE) -> None:
        """Start the clock.

        Args:
            call: the outermost phase for which training waits.
        """
        self.call = call
        self.spans: list[Span] = []
        """Spans in the order of their ends; the first 256 of each name."""
        self.seconds: dict[str, float] = {}
        """Total seconds of all phases that have ended, by name."""
        self.step_on_gpu_s = 0.0
        """Seconds for which the optimizer's step waited for copies on the GPU alone."""
        self.call_events: tuple[Any, Any] = (None, None)
        """Timed CUDA events on the current stream around the loop's call; None where unknown."""
        self._counts: dict[str, int] = {}
        #: Phases that run now: name, thread and start, by an object of each.
        self._running: dict[object, tuple[str, str, float]] = {}
        self._lock = threading.Lock()
        self._has_returned = threading.Event()
        self.restart()

    def restart(self) -> None:
        """Count the age of the save from now on: its call follows work of the training loop."""
        self._started = time.monotonic()
        self._started_at = time.time()

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record here the phases of this thread inside the context."""
        token = _recorder.set(self)
        try:
            yield self
        finally:
            _recorder.reset(token)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the time from entering the context to leaving it, also by an exception."""
        key, thread, started = object(), threading.current_thread().name, time.monotonic()
        with self._lock:
            self._running[key] = (name, thread, started)
        try:
            yield
        finally:
            span = Span(name, thread, started, time.monotonic() - started)
            with self._lock:
                del self._running[key]
                self.seconds[name] = self.seconds.get(name, 0.0) + span.seconds
                self._counts[name] = self._counts.get(name, 0) + 1
                if self._counts[name] <= _MOST:
                    self.spans.append(span)
            if name == self.call:
                self._has_returned.set()

    @property
    def age_s(self) -> float:
        """Seconds since the call of the save."""
        return time.monotonic() - self._started

    def record(
        self, staged_s: float, plan: PlanOrigin, wait_s: float
    ) -> tuple[RankCost, tuple[Span, ...]]:
        """Return timings and phases of this rank's part of the save, which is staged.

        A phase that still runs ends now: copies have ended, so a wait for them is over.

        Args:
            staged_s: seconds from the call until this rank's part was in host memory.
            plan: origin of this rank's plan.
            wait_s: longest wait for the call to return, because the record has its duration.
        """
        self._has_returned.wait(wait_s)
        with self._lock:
            now = time.monotonic()
            running = [
                Span(name, thread, started, now - started)
                for name, thread, started in self._running.values()
            ]
            spans = (*self.spans, *running)
        blocked_s = sum(span.seconds for span in spans if span.name == self.call)
        cost = RankCost(
            started_at=self._started_at, blocked_s=blocked_s, staged_s=staged_s, plan=plan
        )
        return cost, spans

    @property
    def call_s(self) -> float:
        """Seconds for which training waited in the call."""
        return self.seconds.get(self.call, 0.0)

    @property
    def step_s(self) -> float:
        """Seconds for which optimizer steps waited for copies, after the call had returned."""
        calls = [span for span in self.spans if span.name == self.call][:1]
        return self.step_on_gpu_s + sum(
            wait.seconds
            for call in calls
            for wait in self.spans
            if (wait.name, wait.thread) == (WAIT, call.thread) and wait.start >= call.end
        )

    @property
    def blocked_s(self) -> float:
        """Seconds that the save has blocked training: the call, and the waits of later steps."""
        return self.call_s + self.step_s


_recorder: ContextVar[Recorder | None] = ContextVar("flashckpt_recorder", default=None)


def recorder() -> Recorder | None:
    """Return the active recorder of this thread."""
    return _recorder.get()


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Record a phase if a recorder is active in this thread."""
    active = _recorder.get()
    return contextlib.nullcontext() if active is None else active.phase(name)
