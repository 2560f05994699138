"""Copy pieces from the device into a slot while training goes on.

On a GPU the copies run on a side stream into pinned memory; on a CPU a thread does them. Either
way `wait_copied` returns when the source tensors may change again, and `wait` when the slot has
been handed over, too. In front of an optimizer's step `before_change` has the GPU wait, where it
can, and the thread go on. Tensors that the next forward may change must be copied before `save`
returns: `Copy.early`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import torch

from megatron_flashckpt.faults import reach
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.tracing import EARLY, WAIT, Recorder, phase, recorder

logger = logging.getLogger(__name__)

#: Neighbours on a CPU that have so many bytes on the average are copied each by itself. Of 1 MiB
#: and more that took 1.05 times one plain copy of all, 1.2 when concatenated; of 256 KiB 1.2 and
#: 1.0, of 4 KiB 4.6 and 1.6.
_LARGE = 256 * 1024


class Copy(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One piece on its way."""

    source: torch.Tensor
    """Flat and contiguous, on any device."""
    offset: int
    """Where it goes: bytes from the start of the slab."""
    early: bool
    """Whether anything but `optimizer.step()` may change the source."""


@dataclasses.dataclass
class _Job:
    copies: list[Copy]
    finish: Callable[[float, BaseException | None], None]
    recorder: Recorder
    """Of the save that it is part of."""
    ready: torch.cuda.Event | None = None
    """On a GPU: comes when all that was asked of it before the save is done."""
    on_gpu: bool = False
    """Whether the GPU makes all late copies."""
    all_copied: torch.cuda.Event | None = None
    """On a GPU, once `begun`: comes when the last copy is made."""
    error: BaseException | None = None
    """Of an early copy."""
    begun: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Every copy is made, or the GPU has been asked for it, or that has failed."""
    copied: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Or the copying has failed."""
    handed_over: threading.Event = dataclasses.field(default_factory=threading.Event)


class Stager:
    """Owns a rank's copy thread (and stream). One job at a time; used by the training thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._current: _Job | None = None
        self._slab: Slab | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._cuda_device: int | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._run, name="flashckpt-stage", daemon=True)
        self._thread.start()

    def use(self, slab: Slab, *, cuda_device: int | None, pin: bool = True) -> None:
        """Stage into `slab` from now on; with `pin`, pin it if the sources are on a CUDA device.

        The stream is made here, on the training thread: `torch.cuda.set_device` is thread-local,
        and a staging thread that has not called it would create a context on device 0.
        """
        self.wait()
        self._unpin()
        self._slab = slab
        # Through a memoryview: it keeps the mapping from being closed under the tensor, which a
        # tensor made from the mapping itself does not.
        self._bytes = torch.frombuffer(memoryview(slab.memory), dtype=torch.uint8)
        self._cuda_device = cuda_device
        if cuda_device is not None:
            self._stream = self._stream or torch.cuda.Stream(cuda_device)  # type: ignore[no-untyped-call]
        if cuda_device is not None and pin:
            status = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                self._bytes.data_ptr(), slab.geometry.nbytes, 0
            )
            self._pinned = int(status) == 0
            if not self._pinned:
                logger.warning(
                    "slots of %d bytes could not be pinned (%s), so copies will be slower; raise "
                    "`ulimit -l`, or set 'pinned: false' to do without",
                    slab.geometry.nbytes,
                    status,
                )

    def stage(
        self, copies: list[Copy], finish: Callable[[float, BaseException | None], None]
    ) -> None:
        """Start copying; returns when every early copy is made.

        `finish(seconds, error)` is called once, from the copy thread, when all is in the slot or
        a copy has failed.
        """
        self.wait()
        late = [copy for copy in copies if not copy.early]
        job = _Job(late, finish, recorder() or Recorder())
        try:
            if self._stream is not None:
                # Here, not by the copy thread: that one has another current stream, and on this one
                # the next forward may have begun by then.
                job.ready = torch.cuda.current_stream().record_event()
                job.on_gpu = all(copy.source.is_cuda for copy in late)
            with phase(EARLY):
                self._copy([copy for copy in copies if copy.early], job.ready)
            reach("stage.half")
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)
        except Exception as failure:
            job.error = failure
        self._current = job
        if not late and self._stream is None:
            job.copied.set()
        self._jobs.put(job)

    def wait_copied(self) -> None:
        """Return when no copy is under way: the sources may change."""
        self._wait(lambda job: job.copied)

    def before_change(self) -> None:
        """Return when what the current stream is asked for next may change the sources.

        On a GPU that is when it has been asked for all copies, and this stream waits for them: the
        thread goes on to ask for the step. Other streams that Megatron steps or gathers parameters
        on wait for the current one themselves (read in core 0.17.1). Sources in host memory, which
        an offloaded optimizer steps there, and streams that are being captured, which can wait for
        nothing outside of their graph, are waited for here.
        """
        job = self._current
        if (
            job is None
            or not job.on_gpu
            or job.copied.is_set()
            or torch.cuda.is_current_stream_capturing()
        ):
            self.wait_copied()
            return
        self._wait(lambda job: job.begun)
        if job.all_copied is not None:
            torch.cuda.current_stream().wait_event(job.all_copied)

    def wait(self) -> None:
        """Return when no copy is under way, and what was copied has been handed over."""
        self._wait(lambda job: job.handed_over)

    def _wait(self, event: Callable[[_Job], threading.Event]) -> None:
        # Also called by the thread that looks for another agent, hence the local name.
        if (job := self._current) is None:
            return
        if not event(job).is_set():
            with job.recorder.phase(WAIT):
                event(job).wait()
        if job.handed_over.is_set() and self._current is job:
            self._current = None

    def close(self) -> None:
        """End the copy thread and unpin."""
        self.wait()
        self._jobs.put(None)
        self._thread.join()
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._cuda_device is not None:
                torch.cuda.set_device(self._cuda_device)
            started = time.perf_counter()
            error = job.error
            try:
                if error is None:
                    with job.recorder.phase("late copies"):
                        self._copy_late(job)
            except BaseException as failure:
                error = failure
            job.begun.set()
            if error is not None and self._stream is not None:
                # Some copies may have been asked for: nothing of theirs may go under them.
                with contextlib.suppress(RuntimeError):  # the save has failed already
                    self._stream.synchronize()
            job.copies.clear()  # or what they are copies of could not be freed until the next save
            job.copied.set()
            try:
                with job.recorder.recording():
                    job.finish(time.perf_counter() - started, error)
            except Exception:
                # Without this thread every later save would wait for ever.
                logger.exception("what was staged could not be handed over")
            finally:
                # Only now: the next save must find this slot handed over, or it could be given it.
                job.handed_over.set()

    def _copy_late(self, job: _Job) -> None:
        self._copy(job.copies, job.ready)
        if self._stream is None:
            return
        job.all_copied = self._stream.record_event()
        job.begun.set()
        self._stream.synchronize()

    def _copy(self, copies: list[Copy], ready: torch.cuda.Event | None) -> None:
        """Make the copies; on a GPU, ask for them: they begin after `ready`."""
        if not copies:
            return
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                assert ready is not None
                self._stream.wait_event(ready)
                stack.enter_context(torch.cuda.stream(self._stream))
            # One call for many: the interpreter lock is released for its whole length.
            for target, sources in self._neighbours(copies):
                if self._stream is None and target.nbytes < _LARGE * len(sources):
                    torch.cat(sources, out=target)
                else:
                    numels = [source.numel() for source in sources]
                    torch._foreach_copy_(
                        target.split_with_sizes(numels), sources, non_blocking=self._pinned
                    )

    def _neighbours(
        self, copies: list[Copy]
    ) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
        """Yield where in the slab what comes next goes, and the sources: of one type, side by side.

        Nearly all pieces of a kind are: what differs in type or is copied at another time parts
        them. 20,000 pieces one by one took twice as long as their bytes.
        """
        first = 0
        while first < len(copies):
            dtype, start = copies[first].source.dtype, copies[first].offset
            end = start
            sources = []
            for copy in itertools.islice(copies, first, None):
                source = copy.source
                if copy.offset != end or source.dtype != dtype:
                    break
                sources.append(source)
                end += source.nbytes
            first += len(sources)
            yield self._bytes[start:end].view(dtype), tuple(sources)

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(  # type: ignore[no-untyped-call]
                self._bytes.data_ptr()
            )
            self._pinned = False
