"""Measurements of one save: the rate of its copies, their memory, and waits on the GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import torch

from megatron_flashckpt.memory import cuda
from megatron_flashckpt.save.copy_pace import timed_event
from megatron_flashckpt.tracing import Recorder


@dataclasses.dataclass
class CopyFigures:
    """Measurements of one save's copies. The copy thread and the training thread fill them in."""

    nbytes: int = 0
    """Bytes that are copied, early and late; complete when the copies have ended."""
    locked_nbytes: int | None = None
    """Page-locked bytes of the rank's slots; None without a GPU."""
    slab_nbytes: int = 0
    """Bytes of the rank's slots."""
    huge_nbytes: int = 0
    """Bytes of the rank's slots in pages of 2 MiB."""
    seconds: float = 0.0
    """From the first copy to the last one."""
    part_bytes_per_s: float | None = None
    """Rate of a single part of a GPU's copies; None if no part was timed."""
    failed: bool = False
    """True if a copy has failed; then the other figures mean nothing."""
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when all copies are made, or copying has failed."""
    step_wait: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """Events around the wait of the optimizer's step on the GPU; None if there was none."""

    def are_known(self) -> bool:
        """Return whether the copies have ended, and a step that waits for them has begun."""
        if not self.ended.is_set():
            return False
        try:
            return self.failed or self.step_wait is None or bool(self.step_wait[1].query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # the GPU has failed: training gets its error by itself
            self.failed = True
            return True

    def step_wait_s(self) -> float:
        """Return how long the optimizer's step waited on the GPU, once the figures are known."""
        if self.step_wait is None:
            return 0.0
        begin, end = self.step_wait
        return float(begin.elapsed_time(end)) / 1000


@contextlib.contextmanager
def timed_on_gpu(recorder: Recorder) -> Iterator[None]:
    """Put events of `recorder` around the context, on the current stream; wait for neither."""
    begin = _event_of_stream()
    yield
    recorder.call_events = begin, _event_of_stream()


def idle_s(recorder: Recorder) -> float | None:
    """Return how long the loop's call kept the current stream from training's work, if known.

    The begin event completes after all kernels that were launched before the call.
    """
    begin, end = recorder.call_events
    try:
        return None if begin is None or end is None else float(begin.elapsed_time(end)) / 1000
    except RuntimeError:  # the stream has not come to the end, or the GPU has failed
        return None


def _event_of_stream() -> torch.cuda.Event | None:
    """Return a timed event; None without a GPU, in a graph capture, or if CUDA refuses it."""
    try:
        if cuda.current_device() is None or torch.cuda.is_current_stream_capturing():
            return None
        return timed_event()
    except RuntimeError:  # the save's own calls report the error
        return None
