"""How long each phase of a save takes, by the clock that all processes of a node share.

Code that has phases says so with `phase`. It costs nothing worth naming unless a `Recorder` is
recording in this thread. Torch-free: trainers and agents use it alike.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar

import msgspec

from megatron_flashckpt.layout.save_cost import PlanOrigin, RankCost

#: What a save does on the training thread, from the call to its return.
SAVE = "save"
#: Time that the training loop waits around a save, Megatron's timers and barriers included.
LOOP = "save as the training loop sees it"
#: What has to be copied before the save returns.
EARLY = "early copies"
#: Waiting for copies: inside the save (`staging: blocking`), or in front of an optimizer's step.
WAIT = "wait for copies"

#: Phases of one name that are recorded one by one: a shard of 100 GB has thousands of chunks.
_MOST = 256
#: More saves are never under way, unless their outcomes are asked for by nobody.
_MOST_OPEN = 16


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One phase."""

    name: str
    thread: str
    start: float
    """Seconds of `time.monotonic`, which counts alike in all processes of a node."""
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


class Recorder:
    """The phases of one save on one rank. Several threads may record at the same time."""

    def __init__(self, *, in_loop: bool = False) -> None:
        """Args: `in_loop`: the caller calls `seen_by_loop` when the training loop continues."""
        self.started = time.monotonic()
        self.started_at = time.time()
        """Seconds since 1970."""
        self.spans: list[Span] = []
        """In the order of their ends; of one name the first few hundred."""
        self.seconds: dict[str, float] = {}
        """By name, of all phases."""
        self.is_known = False
        """Whether the agent has been told of the save: it drops what is said of others."""
        self._counts: dict[str, int] = {}
        self._sent = 0
        self._lock = threading.Lock()
        self._loop_s: float | None = None
        self._has_returned = threading.Event()
        if not in_loop:
            self._has_returned.set()

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Have what this thread does inside the context recorded here."""
        token = _recorder.set(self)
        try:
            yield self
        finally:
            _recorder.reset(token)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the time from entering the context to leaving it, however it is left."""
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
        """Seconds since the save was called for."""
        return time.monotonic() - self.started

    def seen_by_loop(self, started: float, seconds: float) -> None:
        """Note how long the training loop has waited around this save, which has returned."""
        self._loop_s = seconds
        self._note(LOOP, started, seconds)
        self._has_returned.set()

    def await_loop(self, timeout_s: float) -> None:
        """Return when the training loop continues, at once without `in_loop`, or at the timeout."""
        self._has_returned.wait(timeout_s)

    def staged_cost(self, staged_s: float, plan: PlanOrigin, *, blocking: bool) -> RankCost:
        """Return the timings of this rank's part of the save, up to the staged slot.

        Args:
            staged_s: seconds from the call until all was in host memory.
            plan: how this rank came by its plan.
            blocking: True if training waited for that; else it continued after the early copies.
        """
        blocked_s = self._loop_s
        if blocked_s is None:
            returned = [span.end for span in self.spans if span.name == EARLY and not blocking]
            blocked_s = returned[0] - self.started if returned else staged_s
        return RankCost(
            started_at=self.started_at, blocked_s=blocked_s, staged_s=staged_s, plan=plan
        )

    def first_sent(self) -> tuple[Span, ...]:
        """Return all that was recorded, with which an agent gets to know the save."""
        self.is_known = True
        return self.unsent()

    def unsent(self) -> tuple[Span, ...]:
        """Return what was recorded since the last call."""
        with self._lock:
            found = tuple(self.spans[self._sent :])
            self._sent += len(found)
            return found

    @property
    def blocked_s(self) -> float:
        """Seconds that training has lost to the save: the wait of the loop (of the call, if the
        loop was not measured), and the waits of later steps in the same thread."""
        outer = LOOP if self._loop_s is not None else SAVE
        blocked_s = self.seconds.get(outer, 0.0)
        for call in [span for span in self.spans if span.name == outer][:1]:
            waits = [span for span in self.spans if (span.name, span.thread) == (WAIT, call.thread)]
            blocked_s += sum(wait.seconds for wait in waits if wait.start >= call.end)
        return blocked_s


class OpenTraces:
    """The recorders of a rank's saves whose outcome nobody has asked for yet."""

    def __init__(self) -> None:
        self._open: dict[str, Recorder] = {}

    def begin(self, save_id: str, recorder: Recorder) -> None:
        self._open[save_id] = recorder
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def unsent(self) -> dict[str, tuple[Span, ...]]:
        """Return by save what was recorded since the last call, or since the agent knows of it."""
        known = {save_id: it for save_id, it in self._open.items() if it.is_known}
        found = {save_id: recorder.unsent() for save_id, recorder in known.items()}
        return {save_id: spans for save_id, spans in found.items() if spans}

    def end(self, save_id: str) -> Recorder | None:
        """Return the recorder of a save, and forget it."""
        return self._open.pop(save_id, None)


_recorder: ContextVar[Recorder | None] = ContextVar("flashckpt_recorder", default=None)


def recorder() -> Recorder | None:
    """Return what records in this thread."""
    return _recorder.get()


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Record a phase where somebody is recording."""
    found = _recorder.get()
    return contextlib.nullcontext() if found is None else found.phase(name)
