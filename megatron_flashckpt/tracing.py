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

import msgspec

from megatron_flashckpt.layout.save_cost import PlanOrigin, RankCost

#: The save on the training thread, from the call to its return.
SAVE = "save"
#: Time that the training loop waits for a save, including Megatron's timers and barriers.
LOOP = "save as the training loop sees it"
#: Copies that end before the save returns.
EARLY = "early copies"
#: Wait for copies: inside the save (`staging: blocking`), or before an optimizer step.
WAIT = "wait for copies"
#: Wait of an optimizer step for copies on the GPU, while the training thread continues.
STEP = "wait of the step on the GPU"

#: Spans per name, at most: a shard of 100 GB has thousands of chunks.
_MOST = 256
#: Recorders of open saves, at most; exceeded only if a caller never asks for results.
_MOST_OPEN = 16


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
    """Phases of one save on one rank. Thread-safe."""

    def __init__(self, *, in_loop: bool = False) -> None:
        """Start the clock.

        Args:
            in_loop: the caller calls `seen_by_loop` when the training loop continues.
        """
        self.started = time.monotonic()
        self.started_at = time.time()
        """Seconds since 1970."""
        self.spans: list[Span] = []
        """Spans in the order of their ends; the first 256 of each name."""
        self.seconds: dict[str, float] = {}
        """Total seconds of all phases, by name."""
        self.is_known = False
        """True if the agent knows the save; it drops spans of unknown saves."""
        self._counts: dict[str, int] = {}
        self._sent = 0
        self._lock = threading.Lock()
        self._loop_s: float | None = None
        self._has_returned = threading.Event()
        if not in_loop:
            self._has_returned.set()

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
        started = time.monotonic()
        try:
            yield
        finally:
            self._note(name, started, time.monotonic() - started)

    def _note(self, name: str, started: float, seconds: float) -> None:
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self._counts[name] = self._counts.get(name, 0) + 1
            if self._counts[name] <= _MOST:
                thread = threading.current_thread().name
                self.spans.append(Span(name, thread, started, seconds))

    @property
    def age_s(self) -> float:
        """Seconds since the call of the save."""
        return time.monotonic() - self.started

    def seen_by_loop(self, started: float, seconds: float) -> None:
        """Record the wait of the training loop for this save, after the save has returned."""
        self._loop_s = seconds
        self._note(LOOP, started, seconds)
        self._has_returned.set()

    def await_loop(self, timeout_s: float) -> None:
        """Return when the training loop continues, at once without `in_loop`, or at the timeout."""
        self._has_returned.wait(timeout_s)

    def staged_cost(self, staged_s: float, plan: PlanOrigin, *, blocking: bool) -> RankCost:
        """Return the timings of this rank's part of the save, up to the staged slot.

        Args:
            staged_s: seconds from the call until this rank's part was in host memory.
            plan: origin of this rank's plan.
            blocking: True if training waited for all copies; else only for the early ones.
        """
        blocked_s = self._loop_s
        if blocked_s is None:
            returned = [span.end for span in self.spans if span.name == EARLY and not blocking]
            blocked_s = returned[0] - self.started if returned else staged_s
        return RankCost(
            started_at=self.started_at, blocked_s=blocked_s, staged_s=staged_s, plan=plan
        )

    def first_sent(self) -> tuple[Span, ...]:
        """Return all spans, for the first message to the agent about this save."""
        self.is_known = True
        return self.unsent()

    def unsent(self) -> tuple[Span, ...]:
        """Return the spans since the last call."""
        with self._lock:
            spans = tuple(self.spans[self._sent :])
            self._sent += len(spans)
            return spans

    def waited(self, name: str, seconds: float) -> None:
        """Add a wait that was measured outside of this process's threads, as on the GPU."""
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def step_s(self) -> float:
        """Seconds for which optimizer steps waited for copies, after the save had returned."""
        waited_s = self.seconds.get(STEP, 0.0)
        for call in self._outer_calls():
            waits = [span for span in self.spans if (span.name, span.thread) == (WAIT, call.thread)]
            waited_s += sum(wait.seconds for wait in waits if wait.start >= call.end)
        return waited_s

    @property
    def blocked_s(self) -> float:
        """Seconds that the save has blocked training.

        The sum of the loop's wait (the call's, if the loop was not measured) and of the waits of
        later steps."""
        return self.seconds.get(self._outer_name(), 0.0) + self.step_s

    def _outer_name(self) -> str:
        return LOOP if self._loop_s is not None else SAVE

    def _outer_calls(self) -> list[Span]:
        return [span for span in self.spans if span.name == self._outer_name()][:1]


class OpenTraces:
    """Recorders of a rank's saves whose result has not been reported yet."""

    def __init__(self) -> None:
        self._open: dict[str, Recorder] = {}

    def begin(self, save_id: str, recorder: Recorder) -> None:
        self._open[save_id] = recorder
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def unsent(self) -> dict[str, tuple[Span, ...]]:
        """Return by save the spans since the last call, for saves that the agent knows."""
        known = {save_id: recorder for save_id, recorder in self._open.items() if recorder.is_known}
        unsent = {save_id: item.unsent() for save_id, item in known.items()}
        return {save_id: spans for save_id, spans in unsent.items() if spans}

    def end(self, save_id: str) -> Recorder | None:
        """Remove the recorder of a save and return it."""
        return self._open.pop(save_id, None)


_recorder: ContextVar[Recorder | None] = ContextVar("flashckpt_recorder", default=None)


def recorder() -> Recorder | None:
    """Return the active recorder of this thread."""
    return _recorder.get()


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Record a phase if a recorder is active in this thread."""
    active = _recorder.get()
    return contextlib.nullcontext() if active is None else active.phase(name)
