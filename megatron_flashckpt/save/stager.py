"""Copies of pieces from the device into a slot while training continues.

On a GPU the copies run on a side stream into page-locked memory; on a CPU the copy thread makes
them. `wait_copied` returns when the source tensors may change again; `wait` returns when the slot
has been handed over, too. Before an optimizer's step, `before_change` makes the GPU wait where
possible, and the training thread continues. Tensors that the next forward may change are copied
before `stage` returns.

Late copies are enqueued in parts, spaced by `CopyPace`. So training waits for about one part, not
for gigabytes, when it synchronizes the GPU or copies a loss to the host. Megatron's timers
synchronize the GPU after every save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from megatron_flashckpt.errors import SaveFailedError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.memory import cuda
from megatron_flashckpt.memory.pinned_slab import PinnedSlab
from megatron_flashckpt.memory.runs import Copy, Run, runs
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save.copy_figures import CopyFigures
from megatron_flashckpt.save.copy_pace import CopyPace, timed_event
from megatron_flashckpt.tracing import WAIT, Recorder, phase, recorder

logger = logging.getLogger(__name__)
_Error = TypeVar("_Error", bound=BaseException)

#: Late copies of a GPU are enqueued in parts of this size: 1.3 ms at 52 GB/s. Each part wakes the
#: copy thread; with parts of 16 MiB a launch-bound step lost 37 instead of 25 ms per save of 5 GiB.
PART_NBYTES = 64 * 2**20


@dataclasses.dataclass
class _Job:
    copies: list[Copy]
    """The late copies."""
    tensors: list[torch.Tensor]
    data_offset: int
    finish: Callable[[float, BaseException | None], None]
    recorder: Recorder
    """Recorder of the job's save."""
    figures: CopyFigures
    all_copied: torch.cuda.Event | None = None
    """On a GPU, once `begun` is set: event that completes with the last copy."""
    error: BaseException | None = None
    """Failure of an early copy."""
    awaited: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when the optimizer's step waits: all remaining parts are enqueued at once."""
    begun: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when all copies are made or enqueued, or copying has failed."""
    started: float = dataclasses.field(default_factory=time.perf_counter)
    handed_over: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when `finish` has returned."""

    @property
    def copied(self) -> threading.Event:
        """Set when all copies are made, or copying has failed."""
        return self.figures.ended


class Stager:
    """A rank's copy thread and side stream. Runs one job at a time; used by the training thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._current: _Job | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._slab: Slab | None = None
        self._pinned: PinnedSlab | None = None
        self.device: int | None = None
        """CUDA device whose tensors are copied; None if all tensors are on the host."""
        self._stream: torch.cuda.Stream | None = None
        self._pace: CopyPace | None = None
        self._thread = threading.Thread(target=self._run, name="flashckpt-stage", daemon=True)
        self._thread.start()

    def use(self, slab: Slab, *, device: int | None) -> None:
        """Stage into `slab` from now on, from tensors on the host and on CUDA device `device`.

        Called by any thread that `cuda.enter_thread` has prepared. Waits for running copies.

        Raises:
            SaveFailedError: CUDA cannot create a stream on that device; the former slab is dropped.
        """
        self.drop_slab()
        if device != self.device or (self._stream is None and device is not None):
            self._stream = self.device = self._pace = None
            if device is not None:
                self._stream, self._pace = _new_stream(device), CopyPace(PART_NBYTES)
            self.device = device
        self._slab = slab
        # A memoryview keeps the mapping open while the tensor exists; a tensor of the mapping
        # itself does not.
        self._bytes = torch.frombuffer(memoryview(slab.memory), dtype=torch.uint8)

    def pin(self, lock_directory: Path | None, *, hurry: bool = False) -> None:
        """Begin to page-lock the slab in the background, once per slab and only for a GPU.

        Args:
            lock_directory: shared by the ranks of a node; None for a single rank.
            hurry: make no pauses, because no training runs yet.
        """
        if self.device is not None and self._slab is not None and self._pinned is None:
            self._pinned = PinnedSlab(self._slab, self.device, lock_directory)
            if hurry:
                self._pinned.hurry()

    def wait_pinned(self, timeout_s: float | None = None) -> bool:
        """Wait until page-locking has ended: afterwards only the copy thread calls CUDA.

        Returns:
            False if `timeout_s` passed first.
        """
        return self._pinned is None or self._pinned.wait(timeout_s)

    def is_pinned(self, end: int) -> bool:
        """Return whether all bytes of the slab below `end` are page-locked. For any thread."""
        pinned = self._pinned
        return pinned is not None and pinned.covers(end)

    def drop_slab(self) -> None:
        """Unlock the slab and drop its mapping. Waits for running copies."""
        self.wait()
        self._release_slab(PinnedSlab.unpin)

    def stage(
        self,
        tensors: list[torch.Tensor],
        early: list[Copy],
        late: list[Copy],
        finish: Callable[[float, BaseException | None], None],
        *,
        data_offset: int,
    ) -> CopyFigures:
        """Start copying; return when all early copies are made or, on a GPU, enqueued.

        Args:
            tensors: the sources; the stager keeps this list until the last copy is made.
            early: copies of tensors that other code than `optimizer.step()` may change.
            data_offset: bytes from the start of the slab to the save's data.

        The copy thread calls `finish(seconds, error)` once, when all pieces are in the slot or a
        copy has failed. `stage` never raises: `finish` gets all errors, including those of CUDA.
        """
        self.wait()
        if self._pinned is not None:
            self._pinned.hurry()
        figures = CopyFigures()
        job = _Job(late, tensors, data_offset, finish, recorder() or Recorder(), figures)
        try:
            with phase("early copies"):
                self._copy_early(early, job)
            hit("stage.half")
        except Exception as failure:
            job.error = _without_frames(failure)
            figures.failed = True
        self._current = job
        if not late and self._stream is None:
            self._end_copies(job)
        self._jobs.put(job)
        return figures

    def _check_devices(self, sources: list[torch.Tensor]) -> None:
        """Refuse tensors on other devices, because no stream would wait for their copies."""
        # The number of a tensor in host memory is -1.
        if others := sorted({source.get_device() for source in sources} - {-1, self.device}):
            device = "no GPU" if self.device is None else f"cuda:{self.device}"
            raise SaveFailedError(
                f"tensors of this rank are on cuda:{others[0]}, but the training thread's current "
                f"device is {device}; call torch.cuda.set_device({others[0]}) before the first save"
            )

    def wait_copied(self) -> None:
        """Wait until no copy is running: then the sources may change."""
        self._wait(lambda job: job.copied)

    def before_change(self) -> None:
        """Wait until the next work on the current stream may change the sources.

        On a GPU all copies are enqueued by then, and the current stream waits for them, so the
        thread continues and enqueues the step. Other streams on which Megatron steps or gathers
        parameters wait for the current stream themselves (seen in core 0.17.1). The thread itself
        waits for sources in host memory, where an offloaded optimizer steps. It also waits during a
        graph capture, because a graph cannot wait for an event outside of the graph.
        """
        if (job := self._current) is None:
            return
        job.awaited.set()
        if self._stream is None or job.copied.is_set() or not self._wait_on_device(job):
            self.wait_copied()

    def _wait_on_device(self, job: _Job) -> bool:
        """Make the current stream wait for the copies; return False if CUDA cannot do so."""
        try:
            if torch.cuda.is_current_stream_capturing():
                return False
            self._wait(lambda job: job.begun)  # copies of host tensors are complete by then
            if job.all_copied is not None:
                before = timed_event()
                torch.cuda.current_stream().wait_event(job.all_copied)
                # Both hooks of one step wait; the stream has waited when the second one comes.
                job.figures.step_wait = job.figures.step_wait or (before, timed_event())
        except RuntimeError as error:
            logger.warning(
                "the GPU cannot wait for a save's copies (%s), so the training thread waits for "
                "them before the optimizer's step; if this repeats, restart the job",
                error,
            )
            return False
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no copy is running and the slot has been handed over.

        Returns:
            False if `timeout_s` passed first.
        """
        return self._wait(lambda job: job.handed_over, timeout_s)

    def _wait(
        self, event: Callable[[_Job], threading.Event], timeout_s: float | None = None
    ) -> bool:
        # The local name is needed: the thread that replaces a lost agent calls this, too.
        if (job := self._current) is None:
            return True
        if not event(job).is_set():
            # The next save's call contains a wait inside it, so only waits outside are this save's.
            with (recorder() or job.recorder).phase(WAIT):
                event(job).wait(timeout_s)
        if job.handed_over.is_set() and self._current is job:
            self._current = None
        return event(job).is_set()

    def close(self) -> None:
        """End the copy thread. Waits for running copies."""
        self.wait()
        self._jobs.put(None)
        self._thread.join()
        self._release_slab(PinnedSlab.close)

    def _release_slab(self, release: Callable[[PinnedSlab], None]) -> None:
        if self._pinned is not None:
            release(self._pinned)
            self._pinned = None
        self._slab = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    # ------------------------------------------------------------------ the copy thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._perform(job)
            del job  # an idle thread keeps nothing alive

    def _perform(self, job: _Job) -> None:
        """Copy and hand over. Sets all events of the job, even after a failure."""
        started = time.perf_counter()
        error = job.error
        try:
            if error is None:
                cuda.enter_thread(self.device)
                with job.recorder.phase("late copies"):
                    self._copy_late(job)
        except BaseException as failure:
            error = _without_frames(failure)
        job.begun.set()
        job.figures.failed = error is not None
        if error is not None and self._stream is not None:
            # Some copies may be enqueued: sources and slot must not change until they end.
            with contextlib.suppress(RuntimeError):  # the save has failed already
                self._stream.synchronize()
        job.tensors = []  # frees the sources before the next save
        if not job.copied.is_set():
            self._end_copies(job)
        try:
            with job.recorder.recording():
                job.finish(time.perf_counter() - started, error)
        except Exception:
            # Keep the thread running: every later save would wait for it.
            logger.exception("a staged slot was not handed to the agent; later saves continue")
        finally:
            # Set last: the agent must own this slot before the next save asks for a free slot.
            job.handed_over.set()

    def _end_copies(self, job: _Job) -> None:
        """Fill in the figures that are known when the last copy is made."""
        figures = job.figures
        figures.seconds = time.perf_counter() - job.started
        if self._pace is not None and self._slab is not None:
            figures.locked_nbytes = 0 if self._pinned is None else self._pinned.nbytes
            figures.slab_nbytes = self._slab.geometry.nbytes
            figures.huge_nbytes = self._slab.huge_nbytes
            figures.part_bytes_per_s = self._pace.bytes_per_s
        job.copied.set()

    def _copy_late(self, job: _Job) -> None:
        if self._stream is None:
            for run in self._runs(job.copies, job, sys.maxsize):
                run.copy_on_host()
            return
        assert self._pace is not None
        with torch.cuda.stream(self._stream):
            for part in _parts(self._runs(job.copies, job, PART_NBYTES)):
                self._pace.await_turn(job.awaited)
                with self._pace.part(sum(run.nbytes for run in part)):
                    for run in part:
                        run.keep_memory(self._stream)
                        run.copy_from_device()
            job.all_copied = timed_event()
        job.begun.set()
        job.all_copied.synchronize()

    def _runs(self, copies: list[Copy], job: _Job, most_nbytes: int) -> Iterator[Run]:
        """Yield the runs to copy, of tensors of this rank's device, and count their bytes."""
        places = copies, job.tensors, job.data_offset
        for run in runs(*places, self._bytes, self.is_pinned, most_nbytes):
            self._check_devices(run.sources)
            job.figures.nbytes += run.nbytes
            yield run

    def _copy_early(self, copies: list[Copy], job: _Job) -> None:
        """Copy after all work that training has enqueued; its next work waits for the copies.

        On a GPU this also orders late copies. The copy thread would be too late, because the next
        forward may have begun on the current stream by then.
        """
        if self._stream is None:
            for run in self._runs(copies, job, sys.maxsize):
                run.copy_on_host()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for run in self._runs(copies, job, PART_NBYTES):
                run.copy_from_device()
        torch.cuda.current_stream().wait_stream(self._stream)


def _without_frames(error: _Error) -> _Error:
    """Return the error, told by its message only: its frames would keep the save's tensors."""
    return error.with_traceback(None)


def _new_stream(device: int) -> torch.cuda.Stream:
    try:
        # PyTorch hands its 32 default-priority streams to several users. The pool of high-priority
        # streams has hardly any other user.
        return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise SaveFailedError(
            f"cuda:{device} cannot create a stream for copies to host memory ({error}); restart "
            "the job on another GPU"
        ) from error


def _parts(runs_of_save: Iterator[Run]) -> Iterator[list[Run]]:
    """Group runs into parts of at most `PART_NBYTES`; no run is larger."""
    part: list[Run] = []
    nbytes = 0
    for run in runs_of_save:
        if part and nbytes + run.nbytes > PART_NBYTES:
            yield part
            part, nbytes = [], 0
        part.append(run)
        nbytes += run.nbytes
    if part:
        yield part
