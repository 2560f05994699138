"""Devices of one node, their streams and events, and the settings of each host thread.

Sources of the rules: CUDA C Programming Guide ("Asynchronous Concurrent Execution", "CUDA Graphs"),
CUDA Runtime API ("Stream Management", "Event Management", "API synchronization behavior"),
`torch/cuda/streams.py`, `c10/cuda/CUDAStream.h`, `c10/cuda/CUDAEvent.h`, `ATen/cuda/CUDAGraph.cpp`.

Not simulated, and refused: a second stream that joins a capture.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tests.simulated_gpu.allocator import Allocator

Work = Callable[[], None]

#: Number of a device's streams of one priority; `torch.cuda.Stream` returns them in turn.
POOL_SIZE = 32
#: Number of priorities with a pool: 0, -1, -2 and -3.
PRIORITIES = 4
#: Seconds between two checks of a blocked host thread for a failure of its device.
_LOOK_S = 0.05
#: Seconds that `Node.close` waits for its threads; endless work continues afterwards.
_CLOSE_S = 5.0

ILLEGAL_ADDRESS = 700
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_ISOLATION = 905
CAPTURED_EVENT = 907
UNKNOWN = 999


class _Thread(threading.local):
    """CUDA's settings of one host thread; a new thread starts on device 0."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.latched: str | None = None
        """Error of a failed call, which the next kernel launch of this thread reports."""
        self.capture_mode = "global"
        """Capture mode: decides which captures this thread's unsafe calls break."""


@dataclasses.dataclass(frozen=True)
class Call:
    name: str
    thread: str
    device: int


@dataclasses.dataclass(frozen=True)
class Wait:
    """Wait of a host thread for a device."""

    thread: str
    copied_nbytes: int
    """Bytes of the copies to the host that ended during the wait: its length, however busy the
    simulating machine is."""


class Node:
    """Several devices of one host."""

    def __init__(
        self, devices: int = 8, *, d2h_bytes_per_s: float = 0.0, memory_nbytes: int = 64 << 20
    ) -> None:
        self.d2h_bytes_per_s = d2h_bytes_per_s
        self.has_one_connection = False
        """True to simulate CUDA_DEVICE_MAX_CONNECTIONS=1."""
        self.calls: list[Call] = []
        self.waits: list[Wait] = []
        self.refusals: dict[str, Callable[[], None]] = {}
        """Functions to call in place of CUDA calls, by call name; they may raise."""
        self.captures: list[Capture] = []
        self.runtime: Any = None
        """The node's `runtime.Runtime`."""
        self.closed = threading.Event()
        self.here = _Thread()
        self.devices = [Device(self, index, memory_nbytes) for index in range(devices)]

    def make_default_stream(self, device: Device) -> Stream:
        return Stream(device)

    def call(
        self,
        name: str,
        *,
        device: Device | None = None,
        unsafe: bool = False,
        awaited: Sequence[Stream] = (),
    ) -> None:
        """Record a CUDA call of this thread; raise if it is refused or breaks a capture.

        A capture may prohibit `unsafe` calls. No stream in `awaited` may be in a capture.
        """
        thread = threading.current_thread()
        self.calls.append(Call(name, thread.name, self.here.device))
        if self.closed.is_set():
            raise accelerator_error("driver shutting down")
        (device or self.current_device()).check()
        if name in self.refusals:
            self.refusals[name]()
        if unsafe:
            self._check_captures(name, awaited)

    def _check_captures(self, name: str, awaited: Sequence[Stream]) -> None:
        mode = self.here.capture_mode
        broken = [c for c in self.captures if c.stream in awaited or c.prohibits(mode)]
        for capture in broken:
            capture.broken_by = f"{name} in {threading.current_thread().name}"
        if broken:
            reason = "operation not permitted when stream is capturing"
            raise accelerator_error(reason, CAPTURE_UNSUPPORTED)

    @property
    def is_capturing_here(self) -> bool:
        return any(capture.thread == threading.get_ident() for capture in self.captures)

    def current_device(self) -> Device:
        return self.devices[self.here.device]

    def set_device(self, index: int) -> None:
        """Make `index` the device of the calling thread only."""
        if index < 0:  # a negative index changes nothing, as in torch
            return
        if index >= len(self.devices):
            raise accelerator_error("invalid device ordinal")
        self.call("set_device", device=self.devices[index])
        self.here.device = index

    def exchange_device(self, index: int) -> int:
        former = self.here.device
        self.here.device = index if index >= 0 else former
        return former

    def current_stream(self, index: int | None = None) -> Stream:
        index = self.here.device if index is None else index
        return self.here.streams.get(index, self.devices[index].default_stream)

    def set_stream(self, stream: Stream | None) -> None:
        """Make `stream` and its device current in this thread, as `torch.cuda.set_stream` does."""
        if stream is not None:
            self.here.device = stream.device_index
            self.here.streams[stream.device_index] = stream

    def synchronize(self, index: int | None = None) -> None:
        """Wait for all work that was enqueued on the device before, on any stream."""
        device = self.devices[self.here.device if index is None else index]
        self.call("synchronize", device=device, unsafe=True, awaited=device.streams)
        device.drain()

    def empty_cache(self) -> None:
        """Give the memory that torch caches on every device to the driver.

        This waits for every device: `cudaFree` may.
        """
        self.call("empty_cache", unsafe=True)
        for device in self.devices:
            device.allocator.release()

    @contextlib.contextmanager
    def capture(self, mode: str = "global") -> Iterator[Capture]:
        """Capture the work that this thread enqueues on its current stream into a graph.

        As with `torch.cuda.graph`, a side stream is current inside the context if the default
        stream was, which cannot be captured.
        """
        former = self.current_stream()
        device = self.current_device()
        stream = device.pooled_stream(0) if former is device.default_stream else former
        capture = Capture(stream, mode)
        stream.capture = capture
        self.captures.append(capture)
        self.set_stream(stream)
        try:
            yield capture
        finally:
            self.set_stream(former)
            self.captures.remove(capture)
            stream.capture = None
        capture.check()

    @property
    def is_closed(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        """End all streams and drop queued work; return within 5 s, even if work hangs."""
        self.closed.set()
        streams = [stream for device in self.devices for stream in device.streams]
        for stream in streams:
            stream.end()
        deadline = time.monotonic() + _CLOSE_S
        for thread in [stream.thread for stream in streams if stream.thread is not None]:
            thread.join(max(0.0, deadline - time.monotonic()))


class Device:
    """GPU with a default stream, pools of streams, an engine and an allocator."""

    def __init__(self, node: Node, index: int, memory_nbytes: int) -> None:
        self.node = node
        self.index = index
        self.running = threading.Event()
        """Event that is cleared while the device is held: streams accept work and do none."""
        self.running.set()
        self.error: str | None = None
        """A sticky error: every later call on the device reports it.

        CUDA documents it for the whole process. Here one process represents the ranks of a node,
        so other devices continue.
        """
        self.streams: list[Stream] = []
        self.default_stream = node.make_default_stream(self)
        self._pools: dict[int, list[Stream]] = {}
        self._turns = [itertools.count() for _ in range(PRIORITIES)]
        self._pools_lock = threading.Lock()
        self.to_host = Engine(self)
        self.allocator = Allocator(memory_nbytes, self.drain)

    def pooled_stream(self, priority: int) -> Stream:
        """Return the next stream of a priority's pool; the 33rd stream is the first one again."""
        number = min(max(-priority, 0), PRIORITIES - 1)
        with self._pools_lock:
            pool, turn = self._pools.setdefault(number, []), next(self._turns[number])
            if len(pool) < POOL_SIZE:
                pool.append(Stream(self, -number))
            return pool[turn % POOL_SIZE]

    def drain(self) -> None:
        for mark in [stream.mark() for stream in self.streams]:
            self.block(mark)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.running.clear()
        try:
            yield
        finally:
            self.running.set()

    def fail(self, error: str) -> None:
        self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise accelerator_error(self.error, ILLEGAL_ADDRESS)

    def await_running(self) -> bool:
        """Wait until the device is not held; return False if it may do no more work."""
        while not self.is_over and not self.running.wait(_LOOK_S):
            pass
        return not self.is_over

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.node.is_closed

    def block(self, mark: threading.Event) -> None:
        before, waits = self.to_host.copied_nbytes, not mark.is_set()
        while not mark.wait(_LOOK_S):
            self.check()
            if self.node.is_closed:
                raise accelerator_error("driver shutting down")
        if waits:
            copied_nbytes = self.to_host.copied_nbytes - before
            self.node.waits.append(Wait(threading.current_thread().name, copied_nbytes))
        self.check()


@dataclasses.dataclass(frozen=True)
class _Mark:
    """Work of no duration, which tells that its stream has reached it."""

    tell: Work

    def __call__(self) -> None:
        self.tell()


class Stream:
    """Queue of a device; its work runs in order, on a thread that represents the hardware."""

    def __init__(self, gpu: Device, priority: int = 0) -> None:
        self.gpu = gpu
        self.priority = priority
        self.capture: Capture | None = None
        self._pending: collections.deque[Work | None] = collections.deque()
        """Unfinished work, including the running item."""
        # A finalizer may enqueue while this thread enqueues, so there are atomic calls and no lock.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        gpu.streams.append(self)
        self.thread = self._start()

    def _start(self) -> threading.Thread | None:
        """Start the working thread."""
        name = f"cuda:{self.gpu.index} stream {len(self.gpu.streams) - 1}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        return thread

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.gpu.index)

    @property
    def device_index(self) -> int:
        return self.gpu.index

    def _run(self) -> None:
        while True:
            self._tokens.get()
            work = self._pending[0]
            if work is None:
                return
            self._do(work)
            self._pending.popleft()

    def _do(self, work: Work) -> None:
        if self.gpu.await_running():
            try:
                work()
            except Exception as failure:
                self.gpu.fail(f"{type(failure).__name__}: {failure}")

    def end(self) -> None:
        self._append(None)

    def _append(self, work: Work | None) -> None:
        self._pending.append(work)
        self._tokens.put(None)

    def enqueue(self, work: Work) -> None:
        """Enqueue `work`; a capturing stream adds it to the graph."""
        if self.capture is None:
            self._append(work)
        else:
            self.capture.add(lambda stream: stream.enqueue(work))

    def enqueue_to_host(self, nbytes: int, copy: Work) -> None:
        if self.capture is None:
            earlier = self._earlier_work()
            with self.gpu.to_host.changed:  # one order in the engine and in the stream
                for mark in earlier:
                    self._append(functools.partial(self._await, mark))
                self._append(self.gpu.to_host.ask(self, nbytes, copy))
        else:
            self.capture.add(lambda stream: stream.enqueue_to_host(nbytes, copy))

    def next_work(self) -> Work | None:
        """Return the work that follows the running one, which takes time or waits."""
        later = tuple(self._pending)[1:]
        return next((work for work in later if not isinstance(work, _Mark)), None)

    def _earlier_work(self) -> list[threading.Event]:
        """Return marks of the work for which a copy waits because it came earlier.

        With one connection all streams share a queue, so a copy begins after all kernels that were
        launched before it (seen on an H100; CUDA documents the connections, not the order).
        """
        if not self.gpu.node.has_one_connection:
            return []
        return [stream.mark() for stream in self.gpu.streams if stream is not self]

    def mark(self) -> threading.Event:
        """Return an event that is set when all work enqueued before is done."""
        mark = threading.Event()
        self._append(_Mark(mark.set))
        return mark

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.gpu.node)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for the event's last record so far."""
        self.gpu.node.call("Stream.wait_event", device=self.gpu)
        mark = event.mark
        if mark is None:
            return
        if self.capture is None and event.captured_by is not None:
            raise NotImplementedError("a second stream that joins a capture is not simulated")
        if self.capture is not None and event.captured_by is not self.capture:
            self.capture.broken_by = "a wait for work outside of the capture"
            reason = "dependency created on uncaptured work in another stream"
            raise accelerator_error(reason, CAPTURE_ISOLATION)
        self.enqueue(lambda: self._await(mark))

    def _await(self, mark: threading.Event) -> None:
        while not self.gpu.is_over and not mark.wait(_LOOK_S):
            pass

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        self.gpu.node.call("Stream.query", device=self.gpu, unsafe=True, awaited=[self])
        return not self._pending

    def synchronize(self) -> None:
        self.gpu.node.call("Stream.synchronize", device=self.gpu, unsafe=True, awaited=[self])
        self.gpu.block(self.mark())


class Event:
    """Position in a stream; an event that was never recorded counts as done."""

    def __init__(
        self,
        node: Node,
        enable_timing: bool = False,
        blocking: bool = False,
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
        self._node.call("Event.record", device=stream.gpu)
        if self._device not in (None, stream.gpu):
            raise RuntimeError(
                f"Event device {self._device.index} does not match recording stream's device "
                f"{stream.gpu.index}."
            )
        self._device = stream.gpu
        self.captured_by = stream.capture
        self.mark = mark = threading.Event()

        def come() -> None:
            self.at = time.perf_counter()
            mark.set()

        stream.enqueue(_Mark(come))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._node.current_stream()).wait_event(self)

    def query(self) -> bool:
        self._ask("Event.query")
        return self.mark is None or self.mark.is_set()

    def synchronize(self) -> None:
        """Wait until the last record is reached.

        The thread sleeps if the event is `blocking`; else it spins, which takes a core.
        """
        self._ask("Event.synchronize" if self.blocking else "spin")
        if self.mark is not None and self._device is not None:
            self._device.block(self.mark)

    def _ask(self, name: str) -> None:
        self._node.call(name, device=self._device, unsafe=True)
        if self.captured_by is not None:
            self.captured_by.broken_by = f"{name} of an event that was recorded in the capture"
            reason = "operation not permitted on an event last recorded in a capturing stream"
            raise accelerator_error(reason, CAPTURED_EVENT)

    def elapsed_time(self, end: Event) -> float:
        if not (self._times and end._times):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.mark is None or end.mark is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1000 * (end.at - self.at)


class Engine:
    """Copies to the host, one at a time: first those of the stream that is served, then by calls.

    While the work of one stream is one copy after another, no other stream is served (seen on an
    H100). Otherwise the order of the calls is pessimistic: hardware with several channels may let a
    small copy of another stream go ahead of copies that were enqueued before.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.changed = threading.Condition()
        self._asked: list[Work] = []
        """Unfinished copies, the next one first."""
        self.copied_nbytes = 0
        self.queued_nbytes = 0
        self.most_queued_nbytes = 0

    def ask(self, stream: Stream, nbytes: int, copy: Work) -> Work:
        """Return the work for `stream` that makes this copy in its turn.

        Called with `changed` held.
        """
        self.queued_nbytes += nbytes
        self.most_queued_nbytes = max(self.most_queued_nbytes, self.queued_nbytes)

        def serve() -> None:
            node = self._device.node
            with self.changed:
                while self._asked[0] is not serve and not self._device.is_over:
                    self.changed.wait(_LOOK_S)
            if node.d2h_bytes_per_s:
                node.closed.wait(nbytes / node.d2h_bytes_per_s)
            if self._device.is_over:
                return
            try:
                copy()
            finally:
                with self.changed:
                    self._asked.remove(serve)
                    self._prefer(stream.next_work())
                    self.copied_nbytes += nbytes
                    self.queued_nbytes -= nbytes
                    self.changed.notify_all()

        self._asked.append(serve)
        return serve

    def _prefer(self, work: Work | None) -> None:
        """Make `work` the next copy, if it is one. Nothing is before it in its stream."""
        if work in self._asked:
            self._asked.remove(work)
            self._asked.insert(0, work)


class Capture:
    def __init__(self, stream: Stream, mode: str) -> None:
        self.stream = stream
        self.mode = mode
        self.thread = threading.get_ident()
        self.broken_by: str | None = None
        self.kept: list[object] = []
        """Memory that was allocated in the capture, which only the graph uses from then on."""
        self._requests: list[Callable[[Stream], None]] = []

    def add(self, request: Callable[[Stream], None]) -> None:
        self.check()
        self._requests.append(request)

    def check(self) -> None:
        if self.broken_by is not None:
            reason = f"operation failed due to a previous error during capture: {self.broken_by}"
            raise accelerator_error(reason, CAPTURE_INVALIDATED)

    def prohibits(self, thread_mode: str) -> bool:
        """Return whether this capture prohibits unsafe calls of the calling thread in that mode."""
        if self.thread == threading.get_ident():
            return self.mode != "relaxed" and thread_mode != "relaxed"
        return self.mode == "global" and thread_mode == "global"

    def replay(self) -> None:
        gpu = self.stream.gpu
        stream = gpu.node.current_stream(gpu.index)
        gpu.node.call("graph launch", device=gpu)
        for request in self._requests:
            request(stream)


def accelerator_error(reason: str, status: int = UNKNOWN) -> torch.AcceleratorError:
    error = torch.AcceleratorError(f"CUDA error: {reason}")
    error.error_code = status
    return error
