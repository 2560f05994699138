"""The devices of one node, their streams and events, and what each host thread has set.

Sources of the rules: CUDA C Programming Guide ("Asynchronous Concurrent Execution", "CUDA Graphs"),
CUDA Runtime API ("Stream Management", "Event Management", "API synchronization behavior"),
`torch/cuda/streams.py`, `c10/cuda/CUDAStream.cpp`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.simulated_gpu.allocator import Allocator

Work = Callable[[], None]

#: Streams of one priority that a device has; `torch.cuda.Stream` hands them out in turn.
POOL_SIZE = 32
#: How often a blocked host thread looks whether its device has failed.
_LOOK_S = 0.05


class _Thread(threading.local):
    """What CUDA keeps for one host thread. A new thread begins on device 0."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.latched: str | None = None
        """Error of a failed call that the next kernel launch of this thread will report."""
        self.capture_mode = "global"
        """Which captures of others this thread's unsafe calls heed."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One CUDA call as a host thread made it."""

    name: str
    thread: str
    device: int


class Node:
    """Several devices of one host.

    Args:
        devices: number of devices.
        d2h_bytes_per_s: rate of every device's engine for copies to the host.
        memory_nbytes: memory of each device.
    """

    def __init__(
        self, devices: int = 8, *, d2h_bytes_per_s: float = 0.0, memory_nbytes: int = 64 << 20
    ) -> None:
        self.d2h_bytes_per_s = d2h_bytes_per_s
        self.calls: list[Call] = []
        self.refusals: dict[str, Callable[[], None]] = {}
        """By call name: what is done instead of the call, such as raising an error."""
        self.captures: list[Capture] = []
        self.runtime: Any = None
        """The node's `runtime.Runtime`."""
        self.is_closed = False
        self.here = _Thread()
        self.devices = [Device(self, index, memory_nbytes) for index in range(devices)]

    def call(self, name: str, *, unsafe: bool = False) -> None:
        """Note a CUDA call of this thread; raise if it is refused or breaks a capture.

        Args:
            unsafe: the call is one that a capture in progress may prohibit.
        """
        thread = threading.current_thread()
        self.calls.append(Call(name, thread.name, self.here.device))
        self.current_device().check()
        if name in self.refusals:
            self.refusals[name]()
        if unsafe:
            self._check_captures(name)

    def _check_captures(self, name: str) -> None:
        for capture in self.captures:
            if capture.prohibits(self.here.capture_mode):
                capture.broken_by = f"{name} in {threading.current_thread().name}"
                raise accelerator_error("operation not permitted when stream is capturing")

    @property
    def is_capturing_here(self) -> bool:
        """Whether the calling thread has begun a capture that goes on."""
        return any(capture.thread == threading.get_ident() for capture in self.captures)

    def current_device(self) -> Device:
        """Return the device that the calling thread has set."""
        return self.devices[self.here.device]

    def set_device(self, index: int) -> None:
        """Make `index` the calling thread's device; no other thread is concerned."""
        self.call("set_device")
        if index < 0:  # as torch: a negative index changes nothing
            return
        if index >= len(self.devices):
            raise accelerator_error("invalid device ordinal")
        self.here.device = index

    def current_stream(self, index: int | None = None) -> Stream:
        """Return the calling thread's stream of a device, by default of the current device."""
        index = self.here.device if index is None else index
        return self.here.streams.get(index, self.devices[index].default_stream)

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Make `stream` and its device current in this thread, as `torch.cuda.stream` does."""
        if stream is None:
            yield
            return
        index, device = stream.device.index, self.here.device
        former = self.current_stream(index)
        self.here.device = index
        self.here.streams[index] = stream
        try:
            yield
        finally:
            self.here.streams[index] = former
            self.here.device = device

    def synchronize(self, index: int | None = None) -> None:
        """Return when all that was asked of the device before, on any stream, is done."""
        self.call("synchronize", unsafe=True)
        device = self.devices[self.here.device if index is None else index]
        marks = [stream.mark() for stream in device.streams]
        for mark in marks:
            device.block(mark)

    @contextlib.contextmanager
    def capture(self, mode: str = "global") -> Iterator[Capture]:
        """Capture what this thread asks of its current stream into a graph.

        Raises:
            AcceleratorError: at the end, if a call has invalidated the capture.
        """
        capture = Capture(self.current_stream(), mode)
        capture.stream.capture = capture
        self.captures.append(capture)
        try:
            yield capture
        finally:
            self.captures.remove(capture)
            capture.stream.capture = None
        if capture.broken_by is not None:
            raise accelerator_error(f"capture failed due to a previous error: {capture.broken_by}")

    def close(self) -> None:
        """End all streams, whatever is still queued."""
        self.is_closed = True
        for device in self.devices:
            device.running.set()
            for stream in device.streams:
                stream.end()


class Device:
    """One GPU: a default stream, two pools of streams, an engine and an allocator."""

    def __init__(self, node: Node, index: int, memory_nbytes: int) -> None:
        self.node = node
        self.index = index
        self.running = threading.Event()
        """Cleared while the device is held: streams accept work and do none."""
        self.running.set()
        self.error: str | None = None
        """A sticky error: every later call on the device reports it."""
        self.streams: list[Stream] = []
        self.default_stream = Stream(self)
        self._pools: dict[bool, list[Stream]] = {True: [], False: []}
        self._handed_out = {True: 0, False: 0}
        self.to_host = Engine(self)
        self.allocator = Allocator(memory_nbytes)

    def pooled_stream(self, priority: int) -> Stream:
        """Return the next stream of the pool of a priority; after 32 the first comes again."""
        is_high = priority < 0
        pool, turn = self._pools[is_high], self._handed_out[is_high]
        self._handed_out[is_high] += 1
        if len(pool) < POOL_SIZE:
            pool.append(Stream(self, priority))
        return pool[turn % POOL_SIZE]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let no stream of the device do any work inside the context."""
        self.running.clear()
        try:
            yield
        finally:
            self.running.set()

    def fail(self, error: str) -> None:
        """Break the device for good, as an illegal memory access in a kernel does."""
        self.error = error
        self.running.set()

    def check(self) -> None:
        if self.error is not None:
            raise accelerator_error(self.error)

    def block(self, mark: threading.Event) -> None:
        """Block the calling thread until `mark` is set.

        Raises:
            AcceleratorError: the device has failed.
        """
        while not mark.wait(_LOOK_S):
            self.check()
            if self.node.is_closed:
                raise accelerator_error("driver shutting down")
        self.check()


class Stream:
    """A queue of a device. Its work runs in order, on a thread that stands for the hardware."""

    def __init__(self, device: Device, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.capture: Capture | None = None
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        device.streams.append(self)
        name = f"cuda:{device.index} stream {len(device.streams) - 1}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def device_index(self) -> int:
        return self.device.index

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self.device.running.wait()
            if self.device.error is not None or self.device.node.is_closed:
                continue
            try:
                work()
            except Exception as failure:
                self.device.fail(f"{type(failure).__name__}: {failure}")

    def end(self) -> None:
        self._queue.put(None)

    def enqueue(self, work: Work) -> None:
        """Have `work` done after all that was enqueued before; into a graph while capturing."""
        if self.capture is not None:
            self.capture.work.append(work)
        else:
            self._queue.put(work)

    def mark(self) -> threading.Event:
        """Return what is set when all that was enqueued before is done."""
        mark = threading.Event()
        self._queue.put(mark.set)
        return mark

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.device.node)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Have later work of this stream wait for the event's last record so far."""
        self.device.node.call("Stream.wait_event")
        if self.capture is not None and event.captured_by is not self.capture:
            self.capture.broken_by = "a wait for work outside of the capture"
            raise accelerator_error("dependency created on uncaptured work in another stream")
        mark = event.mark
        if mark is not None:
            self.enqueue(lambda: self._await(mark))

    def _await(self, mark: threading.Event) -> None:
        while not mark.wait(_LOOK_S):
            if self.device.error is not None or self.device.node.is_closed:
                return

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        self.device.node.call("Stream.query", unsafe=True)
        return self.mark().wait(0.0)

    def synchronize(self) -> None:
        self.device.node.call("Stream.synchronize", unsafe=True)
        self.device.block(self.mark())


class Event:
    """A place in a stream. One that was never recorded counts as done."""

    def __init__(
        self,
        node: Node,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self._node = node
        self._times = enable_timing
        self.blocking = blocking
        self.mark: threading.Event | None = None
        self.captured_by: Capture | None = None
        self.at = 0.0
        self._device: Device | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._node.current_stream()
        self._node.call("Event.record")
        if self._device not in (None, stream.device):
            raise accelerator_error("invalid resource handle")
        self._device = stream.device
        self.captured_by = stream.capture
        self.mark = mark = threading.Event()

        def come() -> None:
            self.at = time.perf_counter()
            mark.set()

        stream.enqueue(come)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._node.current_stream()).wait_event(self)

    def query(self) -> bool:
        self._node.call("Event.query", unsafe=True)
        return self.mark is None or self.mark.is_set()

    def synchronize(self) -> None:
        """Return when the last record has come.

        The thread sleeps if the event is `blocking`; else it spins, which takes a core.
        """
        self._node.call("Event.synchronize" if self.blocking else "spin", unsafe=True)
        if self.mark is not None and self._device is not None:
            self._device.block(self.mark)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds between two records."""
        if not (self._times and end._times):
            raise ValueError("both events must be made with enable_timing=True")
        return 1000 * (end.at - self.at)


class Engine:
    """Copies to the host, one at a time, in the order in which they were asked for.

    The order is pessimistic: hardware with several channels may let a small copy of another
    stream go ahead of copies that were asked for before.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._asked = 0
        self._served = 0
        self.queued_nbytes = 0
        self.most_queued_nbytes = 0

    def ask(self, nbytes: int, copy: Work) -> Work:
        """Return the work for a stream that makes this copy when its turn comes."""
        with self._changed:
            number = self._asked
            self._asked += 1
            self.queued_nbytes += nbytes
            self.most_queued_nbytes = max(self.most_queued_nbytes, self.queued_nbytes)

        def serve() -> None:
            node = self._device.node
            with self._changed:
                while self._served != number and not node.is_closed:
                    self._changed.wait(_LOOK_S)
            if node.d2h_bytes_per_s:
                time.sleep(nbytes / node.d2h_bytes_per_s)
            try:
                copy()
            finally:
                with self._changed:
                    self._served += 1
                    self.queued_nbytes -= nbytes
                    self._changed.notify_all()

        return serve


class Capture:
    """A graph in the making."""

    def __init__(self, stream: Stream, mode: str) -> None:
        self.stream = stream
        self.mode = mode
        self.thread = threading.get_ident()
        self.work: list[Work] = []
        self.broken_by: str | None = None

    def prohibits(self, thread_mode: str) -> bool:
        """Return whether the calling thread, in that mode, may make no unsafe call now."""
        if self.thread == threading.get_ident():
            return self.mode != "relaxed"
        return self.mode == "global" and thread_mode == "global"

    def replay(self) -> None:
        """Enqueue all that was captured on the stream that it was captured on."""
        for work in self.work:
            self.stream.enqueue(work)


def accelerator_error(reason: str) -> Exception:
    """Return the error that torch raises for a failed CUDA call."""
    return torch.AcceleratorError(f"CUDA error: {reason}")
