"""Tests that the simulated node is no kinder than CUDA and torch are by their documents.

One test per rule and source. Only rules have a test whose breach would hide a fault of the package.
If the node were stricter than its sources, the tests that use it would fail.

Abbreviations of the sources: "Guide" is the CUDA C Programming Guide, "Runtime API" the reference
of the CUDA Runtime API; files are those of pytorch.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest
import torch

from tests.simulated_gpu import Node, simulated_gpus
from tests.simulated_gpu.node import POOL_SIZE
from tests.simulated_gpu.runtime import (
    ALREADY_REGISTERED,
    INVALID_VALUE,
    NOT_REGISTERED,
    SUCCESS,
)
from tests.support.trainer import PATIENCE_S, eventually

T = TypeVar("T")

GLOBAL, RELAXED = 0, 2
N = 1024


@pytest.fixture
def node() -> Iterator[Node]:
    with simulated_gpus(3) as node:
        yield node


def begin(work: Callable[[], T], name: str = "other thread") -> Future[T]:
    """Call `work` in a new thread."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def elsewhere(work: Callable[[], T]) -> T:
    """Return the result of `work`, which a new thread has called."""
    return begin(work).result(PATIENCE_S)


def await_call(node: Node, name: str, thread: str = "other thread") -> None:
    """Wait until `thread` has made the call; the call may block."""
    eventually(name, lambda: any((c.name, c.thread) == (name, thread) for c in node.calls))


def keep_busy(stream: Any, go: threading.Event) -> None:
    """Block a stream until `go` is set."""
    stream.enqueue(go.wait)


def filled(value: int, device: str = "cuda:0", nbytes: int = N) -> torch.Tensor:
    made = torch.full((nbytes,), value, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return made


def locked(nbytes: int = N) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)


def is_full_of(tensor: torch.Tensor, value: int) -> bool:
    return torch.equal(tensor, torch.full_like(tensor, value))


def exchange(mode: int) -> tuple[int, int]:
    """Return the status, and the mode that the calling thread had."""
    given = ctypes.c_int(mode)
    status = torch.cuda.cudart().cudaThreadExchangeStreamCaptureMode(ctypes.byref(given))
    return status, given.value


class TestDevices:
    def test_a_new_thread_begins_on_device_0(self, node: Node) -> None:
        """Runtime API, Device Management, cudaSetDevice: it sets the device of the calling host
        thread; a thread that never called it uses device 0."""
        torch.cuda.set_device(2)
        assert elsewhere(torch.cuda.current_device) == 0
        assert torch.cuda.current_device() == 2

    def test_a_failed_device_fails_every_later_call(self, node: Node) -> None:
        """Runtime API, cudaErrorIllegalAddress: the process is left in an inconsistent state, and
        any further CUDA work will return the same error. (Here: any work on that device.)"""
        torch.cuda.set_device(1)
        made, event, stream = filled(1, "cuda:1"), torch.cuda.Event(), torch.cuda.Stream(1)
        event.record()
        node.devices[1].fail("an illegal memory access was encountered")
        calls: list[Callable[[], Any]] = [
            torch.cuda.synchronize,
            event.query,
            event.synchronize,
            event.record,
            stream.query,
            stream.synchronize,
            lambda: stream.wait_event(event),
            lambda: torch.cuda.Stream(1),
            lambda: torch.empty(1, device="cuda:1"),
            lambda: made.add_(1),
            lambda: made.cpu(),
            lambda: locked().copy_(made, non_blocking=True),
            lambda: made.copy_(torch.zeros(N, dtype=torch.uint8)),
            lambda: torch.cuda.set_device(1),
        ]
        for call in calls:
            with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
                call()
        torch.cuda.set_device(0)
        for call in calls:
            if call not in (torch.cuda.synchronize, event.record):  # these concern device 0 now
                with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
                    call()


class TestStreams:
    def test_the_current_stream_is_per_thread_and_device(self, node: Node) -> None:
        """c10/cuda/CUDAStream.h, "Stream pool note": the notion of the current stream of a device
        is thread local."""
        stream = torch.cuda.Stream(1)
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream(1) is stream
            assert torch.cuda.current_stream(0) is torch.cuda.default_stream(0)
            there = elsewhere(lambda: torch.cuda.current_stream(1))
            assert there is torch.cuda.default_stream(1)

    def test_work_runs_later_and_in_order(self, node: Node) -> None:
        """Guide, "Asynchronous Concurrent Execution", "Streams": kernel launches return before the
        device is done; a stream is a sequence of commands that execute in order."""
        with node.devices[0].held():
            made = torch.full((N,), 3, device="cuda")
            made.mul_(5)
            made.add_(1)
            assert not torch.cuda.current_stream().query()
        assert made.tolist() == [16] * N
        assert torch.cuda.current_stream().query()

    def test_streams_run_independently(self, node: Node) -> None:
        """Guide, "Streams": different streams may execute their commands out of order with
        respect to one another."""
        made, go = filled(1), threading.Event()
        side = torch.cuda.Stream()
        keep_busy(torch.cuda.current_stream(), go)
        with torch.cuda.stream(side):
            made.add_(1)
        side.synchronize()
        assert not torch.cuda.current_stream().query()
        go.set()
        assert made.tolist() == [2] * N

    def test_an_operation_runs_on_the_stream_of_its_tensors_device(self, node: Node) -> None:
        """torchgen (`OptionalDeviceGuard` of the tensor) with c10/cuda/CUDAStream.h: the current
        stream of the tensor's device counts, whatever device is current."""
        made, stream_of_0 = filled(1, "cuda:1"), torch.cuda.Stream(0)
        with node.devices[1].held(), torch.cuda.stream(stream_of_0):
            made.add_(1)
            assert not torch.cuda.default_stream(1).query()
            stream_of_0.synchronize()
        assert made.tolist() == [2] * N

    def test_an_operation_on_tensors_of_two_devices_is_refused(self, node: Node) -> None:
        """aten/src/ATen/TensorIterator.cpp `compute_types`: all tensors are on one device; a
        number on the host may join, and is read at the call."""
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            filled(1) + filled(1, "cuda:1")
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            filled(1) + torch.ones(N)
        number = torch.tensor(2.0)
        made = torch.ones(N, device="cuda")
        with node.devices[0].held():
            made.mul_(number)
            number.fill_(7)
        assert made.tolist() == [2.0] * N

    def test_the_33rd_stream_is_the_first_again(self, node: Node) -> None:
        """c10/cuda/CUDAStream.h, "Stream pool note": there are 32 streams per device and priority,
        used in turn; the 33rd and the first are the same stream."""
        streams = [torch.cuda.Stream() for _ in range(POOL_SIZE + 1)]
        assert streams[POOL_SIZE] is streams[0]
        assert len(set(streams)) == POOL_SIZE == 32
        assert torch.cuda.Stream(1) not in streams


class TestCopies:
    def test_a_copy_reads_its_source_when_it_runs(self, node: Node) -> None:
        """Guide, "Streams": a copy is a command of a stream; nothing orders it with a kernel of
        another stream, so it may see what that kernel wrote."""
        made, target, side = filled(1), locked(), torch.cuda.Stream()
        go = threading.Event()
        keep_busy(torch.cuda.current_stream(), go)
        target.copy_(made, non_blocking=True)
        with torch.cuda.stream(side):
            made.fill_(9)
        side.synchronize()
        go.set()
        torch.cuda.synchronize()
        assert is_full_of(target, 9)

    def test_a_non_blocking_copy_into_locked_memory_returns_early(self, node: Node) -> None:
        """Runtime API, "API synchronization behavior", Memcpy, Asynchronous: for transfers between
        device memory and page-locked host memory the call returns at once."""
        target = torch.zeros(N, dtype=torch.uint8)
        assert torch.cuda.cudart().cudaHostRegister(target.data_ptr(), N, 0) == SUCCESS
        made = filled(1)
        with node.devices[0].held():
            target.copy_(made, non_blocking=True)
            torch._foreach_copy_([target], [made], non_blocking=True)
            assert is_full_of(target, 0)
        torch.cuda.synchronize()
        assert is_full_of(target, 1)

    @pytest.mark.parametrize("non_blocking", [False, True])
    def test_a_copy_into_pageable_memory_returns_when_complete(
        self, node: Node, non_blocking: bool
    ) -> None:
        """Runtime API, "API synchronization behavior", Memcpy, Asynchronous: for transfers from
        device memory to pageable host memory the call returns once the copy has completed."""
        made, target = filled(1), torch.zeros(N, dtype=torch.uint8)
        with node.devices[0].held():
            copying = begin(lambda: target.copy_(made, non_blocking))
            await_call(node, "Stream.synchronize")
            assert not copying.done()
        copying.result(PATIENCE_S)
        assert is_full_of(target, 1)

    @pytest.mark.parametrize("non_blocking", [False, True])
    def test_a_copy_across_a_border_of_locked_memory_is_refused(
        self, node: Node, non_blocking: bool
    ) -> None:
        """Pessimistic assumption; no document says that it works: Runtime API, cudaHostRegister,
        speaks of one range. Whether torch waits behind `cudaMemcpyAsync` changes nothing."""
        host, runtime = torch.zeros(3 * N, dtype=torch.uint8), torch.cuda.cudart()
        for begins in (0, N):
            assert runtime.cudaHostRegister(host.data_ptr() + begins, N, 0) == SUCCESS
        made = filled(1)
        for begins in (N // 2, N + N // 2):  # of two registrations, and into pageable memory
            target = host[begins : begins + N]
            with pytest.raises(torch.AcceleratorError, match="invalid argument"):
                target.copy_(made, non_blocking)
            with pytest.raises(torch.AcceleratorError, match="invalid argument"):
                made.copy_(target, non_blocking)
        host[N : 2 * N].copy_(made, non_blocking)
        torch.cuda.synchronize()
        assert host.tolist() == [0] * N + [1] * N + [0] * N

    def test_a_copy_from_pageable_memory_reads_it_at_the_call(self, node: Node) -> None:
        """Runtime API, "API synchronization behavior", Memcpy: for transfers from pageable host
        memory the stream is synchronized, and the call returns once the bytes are in the staging
        memory."""
        source, made = torch.ones(N, dtype=torch.uint8), filled(0)
        with node.devices[0].held():
            copying = begin(lambda: made.copy_(source, non_blocking=True))
            await_call(node, "Stream.synchronize")
            assert not copying.done()
            source.fill_(2)
        copying.result(PATIENCE_S)
        source.fill_(9)
        assert made.tolist() == [2] * N

    def test_a_copy_from_locked_memory_reads_it_later(self, node: Node) -> None:
        """Runtime API, "API synchronization behavior", Memcpy, Asynchronous: from page-locked
        memory the call returns at once; changing it then is a race."""
        source, made = locked(), filled(0)
        with node.devices[0].held():
            made.copy_(source, non_blocking=True)
            source.fill_(9)
        assert made.tolist() == [9] * N

    def test_copies_to_the_host_run_in_the_order_of_the_calls(self, node: Node) -> None:
        """Pessimistic assumption: Guide, "Overlap of Data Transfer and Kernel Execution", has
        engines for each direction; here a device has one for the host, and it is a queue."""
        big, small, side = filled(1), filled(2), torch.cuda.Stream()
        with torch.cuda.stream(side):
            go = threading.Event()
            keep_busy(side, go)
            target = locked().copy_(big, non_blocking=True)
        item = begin(lambda: small[0].item())
        await_call(node, "Stream.synchronize")
        assert not item.done()
        assert node.devices[0].to_host.queued_nbytes == N + 1
        go.set()
        assert item.result(PATIENCE_S) == 2
        assert is_full_of(target, 1)
        assert node.devices[0].to_host.most_queued_nbytes == N + 1


class TestEvents:
    def test_an_event_that_was_never_recorded_is_done(self, node: Node) -> None:
        """Runtime API, cudaEventQuery, cudaEventSynchronize and cudaStreamWaitEvent: before the
        first cudaEventRecord they return at once (c10/cuda/CUDAEvent.h: `is_created_`)."""
        event = torch.cuda.Event()
        with node.devices[0].held():
            assert event.query()
            event.synchronize()
            event.wait()
        torch.cuda.synchronize()

    def test_streams_of_other_devices_may_wait_but_not_record(self, node: Node) -> None:
        """torch/cuda/streams.py `Event`: only streams of the device of the first record may record
        it, and streams of any device may wait (c10/cuda/CUDAEvent.h `record`)."""
        event, go = torch.cuda.Event(), threading.Event()
        keep_busy(torch.cuda.current_stream(0), go)
        event.record(torch.cuda.current_stream(0))
        torch.cuda.current_stream(1).wait_event(event)
        assert not torch.cuda.current_stream(1).query()
        message = "Event device 0 does not match recording stream's device 1"
        with pytest.raises(RuntimeError, match=message):
            event.record(torch.cuda.current_stream(1))
        go.set()
        torch.cuda.synchronize(1)

    def test_only_a_blocking_event_lets_the_thread_sleep(self, node: Node) -> None:
        """Runtime API, cudaEventSynchronize: without cudaEventBlockingSync the thread spins."""
        for blocking, name in ((True, "Event.synchronize"), (False, "spin")):
            event = torch.cuda.Event(blocking=blocking)
            event.record()
            event.synchronize()
            assert node.calls[-1].name == name

    def test_elapsed_time_needs_two_completed_events(self, node: Node) -> None:
        """c10/cuda/CUDAEvent.h `elapsed_time`: both events have timing, were recorded, and are
        done."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with pytest.raises(ValueError, match="must be created with argument 'enable_timing=True'"):
            first.elapsed_time(torch.cuda.Event())
        with pytest.raises(ValueError, match="must be recorded before"):
            first.elapsed_time(last)
        with node.devices[0].held():
            first.record()
            last.record()
            with pytest.raises(RuntimeError, match="must be completed before"):
                first.elapsed_time(last)
        torch.cuda.synchronize()
        assert first.elapsed_time(last) >= 0


class TestSynchronize:
    def test_it_waits_for_all_streams_of_the_device(self, node: Node) -> None:
        """Runtime API, cudaDeviceSynchronize: it blocks until the device has completed all
        preceding requested tasks."""
        side, go = torch.cuda.Stream(), threading.Event()
        keep_busy(side, go)
        waiting = begin(torch.cuda.synchronize)
        await_call(node, "synchronize")
        assert not waiting.done()
        go.set()
        waiting.result(PATIENCE_S)
        assert side.query()


class TestAllocator:
    def test_freed_memory_goes_to_the_next_tensor(self, node: Node) -> None:
        """torch docs, "CUDA semantics", "Memory management": a caching allocator hands memory out
        again without waiting for the device. The next tensor holds what was there before."""
        made = filled(7)
        address = made.data_ptr()
        with node.devices[0].held():
            made.add_(1)
            del made
            again = torch.empty(N, dtype=torch.uint8, device="cuda")
            assert again.data_ptr() == address
        assert again.tolist() == [8] * N

    @pytest.mark.parametrize("is_recorded", [False, True])
    def test_only_record_stream_makes_reuse_safe_for_a_side_stream(
        self, node: Node, is_recorded: bool
    ) -> None:
        """torch docs, `Tensor.record_stream`: without it, memory that a side stream still uses is
        overwritten; with it, it is not reused until what that stream had to do is done."""
        target, made, side = locked(), filled(7), torch.cuda.Stream()
        address, go = made.data_ptr(), threading.Event()
        keep_busy(side, go)
        with torch.cuda.stream(side):
            target.copy_(made, non_blocking=True)
        if is_recorded:
            made.record_stream(side)
        del made
        again = torch.full((N,), 9, dtype=torch.uint8, device="cuda")
        assert (again.data_ptr() == address) is not is_recorded
        torch.cuda.current_stream().synchronize()
        go.set()
        side.synchronize()
        assert is_full_of(target, 7 if is_recorded else 9)
        other = torch.empty(N, dtype=torch.uint8, device="cuda")
        assert (other.data_ptr() == address) is is_recorded

    def test_a_tensor_that_does_not_fit_raises_out_of_memory(self, node: Node) -> None:
        """torch docs, "CUDA semantics", "Memory management": torch.OutOfMemoryError; before that
        the allocator gives back what it caches and tries again."""
        side = torch.cuda.Stream()
        nbytes = node.devices[0].allocator.nbytes
        assert torch.cuda.mem_get_info() == (nbytes, nbytes)
        quarters = [filled(1, nbytes=nbytes // 4) for _ in range(4)]
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            filled(1)
        assert torch.cuda.mem_get_info() == (0, nbytes)
        del quarters
        with torch.cuda.stream(side):
            filled(1, nbytes=nbytes)
        assert node.devices[0].allocator.peak == nbytes

    def test_the_driver_gets_memory_back_when_the_cache_is_emptied(self, node: Node) -> None:
        """torch docs, `torch.cuda.empty_cache`: it releases unoccupied cached memory, so that other
        applications can use it; Runtime API, cudaMemGetInfo: free memory of the device."""
        allocator = node.devices[0].allocator
        made = filled(1, nbytes=allocator.nbytes // 2)
        del made
        assert torch.cuda.mem_get_info()[0] == allocator.nbytes // 2
        with pytest.raises(torch.OutOfMemoryError, match="cudaMalloc"):
            allocator.allocate_outside(allocator.nbytes)
        torch.cuda.empty_cache()
        block = allocator.allocate_outside(allocator.nbytes)
        assert torch.cuda.mem_get_info()[0] == 0
        del block
        assert torch.cuda.mem_get_info()[0] == allocator.nbytes


class TestHostRegister:
    @pytest.fixture
    def host(self) -> torch.Tensor:
        return torch.zeros(4 * N, dtype=torch.uint8)

    def test_a_range_is_registered_once(self, node: Node, host: torch.Tensor) -> None:
        """Runtime API, cudaHostRegister, cudaErrorHostMemoryAlreadyRegistered (712): the range, or
        part of it, is registered already."""
        runtime, address = torch.cuda.cudart(), host.data_ptr()
        assert runtime.cudaHostRegister(address + N, N, 0) == SUCCESS
        for begins, nbytes in ((N, N), (0, N + 1), (2 * N - 1, N), (0, 4 * N)):
            status = runtime.cudaHostRegister(address + begins, nbytes, 0)
            assert status == ALREADY_REGISTERED == 712
        assert runtime.cudaHostRegister(address, N, 0) == SUCCESS
        assert runtime.cudaHostRegister(address, 0, 0) == INVALID_VALUE == 1

    def test_a_range_is_unregistered_by_its_base_address(
        self, node: Node, host: torch.Tensor
    ) -> None:
        """Runtime API, cudaHostUnregister, cudaErrorHostMemoryNotRegistered (713): the base address
        must be the same that cudaHostRegister was called with."""
        runtime, address = torch.cuda.cudart(), host.data_ptr()
        runtime.cudaHostRegister(address, N, 0)
        assert runtime.cudaHostUnregister(address + 1) == NOT_REGISTERED == 713
        assert runtime.cudaHostUnregister(address) == SUCCESS
        assert runtime.cudaHostUnregister(address) == NOT_REGISTERED
        assert runtime.cudaHostRegister(address, 2 * N, 0) == SUCCESS

    def test_the_next_kernel_of_the_thread_raises_a_failure_once(
        self, node: Node, host: torch.Tensor
    ) -> None:
        """Runtime API, cudaGetLastError: it returns the last error of the calling host thread and
        resets it; c10/cuda/CUDAException.h: torch asks behind every kernel launch."""
        made, node.runtime.failing_call = filled(1), 0
        torch.cuda.cudart().cudaHostRegister(host.data_ptr(), N, 0)
        elsewhere(lambda: made.add_(1))
        with pytest.raises(torch.AcceleratorError, match="CUDA error: out of memory"):
            made.add_(1)
        made.add_(1)
        assert made.tolist() == [3] * N


class TestCapture:
    @pytest.fixture
    def event(self, node: Node) -> torch.cuda.Event:
        """Return a recorded event that is done."""
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        return event

    def test_kernels_are_recorded_and_run_at_replay(self, node: Node) -> None:
        """Guide, "Creating a Graph Using Stream Capture": work that is launched into a capturing
        stream is not enqueued; ATen/cuda/CUDAGraph.cpp `replay` launches it on the current
        stream."""
        made, target = filled(1), locked()
        with node.capture() as graph:
            made.add_(1)
            target.copy_(made, non_blocking=True)
        torch.cuda.synchronize()
        assert is_full_of(target, 0)
        for value in (2, 3):
            graph.replay()
            torch.cuda.current_stream().synchronize()
            assert is_full_of(target, value)
        assert made.tolist() == [3] * N

    def test_is_current_stream_capturing_reports_a_capture(self, node: Node) -> None:
        """torch/cuda/graphs.py `is_current_stream_capturing`: True if a capture is under way on
        the current stream, which is one per thread and device."""
        assert not torch.cuda.is_current_stream_capturing()
        with node.capture():
            assert torch.cuda.is_current_stream_capturing()
            assert not elsewhere(torch.cuda.is_current_stream_capturing)
        assert not torch.cuda.is_current_stream_capturing()

    UNSAFE = (
        "event query",
        "event synchronize",
        "stream query",
        "stream synchronize",
        "device synchronize",
        "allocation",
        "copy to pageable memory",
        "pinned allocation",
    )

    def call(self, name: str, event: torch.cuda.Event, made: torch.Tensor) -> Any:
        return {
            "event query": event.query,
            "event synchronize": event.synchronize,
            "stream query": torch.cuda.default_stream().query,
            "stream synchronize": torch.cuda.default_stream().synchronize,
            "device synchronize": lambda: torch.cuda.synchronize(1),
            "allocation": lambda: torch.empty(1, device="cuda"),
            "copy to pageable memory": made.cpu,
            "pinned allocation": locked,
        }[name]

    @pytest.mark.parametrize("name", UNSAFE)
    def test_unsafe_calls_of_other_threads_fail_and_break_a_global_capture(
        self, node: Node, event: torch.cuda.Event, name: str
    ) -> None:
        """Runtime API, cudaThreadExchangeStreamCaptureMode: in global mode, the default, a thread
        is prohibited from potentially unsafe calls while any other has a capture that was begun
        in global mode. Guide, "Invalidation": the graph is then lost."""
        call, refused = self.call(name, event, filled(1)), "operation not permitted when stream is"
        with (
            pytest.raises(torch.AcceleratorError, match="due to a previous error during capture"),
            node.capture(),
            pytest.raises(torch.AcceleratorError, match=refused),
        ):
            elsewhere(call)

    def test_a_host_registration_by_another_thread_fails_with_a_status(self, node: Node) -> None:
        """Runtime API, cudaErrorStreamCaptureUnsupported (900): the operation is not permitted
        when the stream is capturing; functions of the runtime return it."""
        host = torch.zeros(N)
        register = torch.cuda.cudart().cudaHostRegister
        with (
            pytest.raises(torch.AcceleratorError, match="previous error during capture: cudaHost"),
            node.capture(),
        ):
            assert elsewhere(lambda: register(host.data_ptr(), N, 0)) == 900
        with node.capture():
            status = elsewhere(lambda: (exchange(RELAXED), register(host.data_ptr(), N, 0)))
            assert status == ((SUCCESS, GLOBAL), SUCCESS)

    def test_a_wait_for_a_capturing_stream_or_its_device_is_refused(self, node: Node) -> None:
        """Guide, "Prohibited and Unhandled Operations": it is invalid to query or synchronize a
        stream that is being captured, or the device with any such stream, in whatever mode."""
        for call in (torch.cuda.synchronize, lambda: graph.stream.synchronize()):
            with (
                pytest.raises(torch.AcceleratorError, match="previous error"),
                node.capture("relaxed") as graph,
                pytest.raises(torch.AcceleratorError, match="not permitted"),
            ):
                elsewhere(lambda call=call: (exchange(RELAXED), call()))

    def test_a_wait_for_a_captured_event_is_refused(self, node: Node) -> None:
        """Runtime API, cudaErrorCapturedEvent (907): the operation is not permitted on an event
        that was last recorded in a capturing stream, in whatever mode."""
        event = torch.cuda.Event()

        def capture() -> None:
            with node.capture("relaxed"):
                event.record()
                with pytest.raises(torch.AcceleratorError, match="recorded in a capturing stream"):
                    elsewhere(lambda: (exchange(RELAXED), event.query()))

        with pytest.raises(torch.AcceleratorError, match="previous error"):
            capture()

    def test_a_capture_that_waits_for_an_outside_event_breaks(
        self, node: Node, event: torch.cuda.Event
    ) -> None:
        """Runtime API, cudaErrorStreamCaptureIsolation (905): a dependency would cross the
        boundary of the capture; Guide, "Prohibited and Unhandled Operations"."""
        with (
            pytest.raises(torch.AcceleratorError, match="outside of the capture"),
            node.capture(),
            pytest.raises(torch.AcceleratorError, match="uncaptured work in another stream"),
        ):
            event.wait()

    def test_a_capture_refuses_copies_of_pageable_memory(self, node: Node) -> None:
        """aten/src/ATen/native/cuda/Copy.cu `copy_kernel_cuda`: between host and device only
        pinned memory is captured."""
        made = filled(1)
        host = torch.zeros(N, dtype=torch.uint8)
        with node.capture():
            with pytest.raises(RuntimeError, match="unless the CPU tensor is pinned"):
                host.copy_(made, non_blocking=True)
            with pytest.raises(RuntimeError, match="unless the CPU tensor is pinned"):
                made.copy_(host, non_blocking=True)


class TestNode:
    def test_the_context_restores_torch_and_ends_all_threads(self) -> None:
        """Rule of this simulation: nothing of it outlives its context."""
        before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
        before_torch = {name: getattr(torch, name) for name in dir(torch)}
        cuda_method, threads = torch.Tensor.cuda, set(threading.enumerate())
        with simulated_gpus(2) as node:
            for _ in range(POOL_SIZE):
                torch.cuda.Stream(1)
            filled(1, "cuda:1").add_(1)
            streams = [stream.thread for device in node.devices for stream in device.streams]
            assert len(streams) == POOL_SIZE + 2
            assert {thread.is_alive() for thread in streams} == {True}
        assert {name: getattr(torch.cuda, name) for name in dir(torch.cuda)} == before
        assert {name: getattr(torch, name) for name in dir(torch)} == before_torch
        assert torch.Tensor.cuda is cuda_method
        assert set(threading.enumerate()) == threads
        with pytest.raises(torch.AcceleratorError, match="driver shutting down"):
            node.call("anything")

    def test_the_context_ends_while_a_device_is_held(self) -> None:
        """Rule of this simulation: waiting threads get the error of a driver that shuts down,
        queued work is dropped, and the node's threads end."""
        threads = set(threading.enumerate())
        with simulated_gpus(1, d2h_bytes_per_s=1.0) as node:
            made, target = filled(1), locked()
            target.copy_(made, non_blocking=True)  # takes 1024 s
            with torch.cuda.stream(torch.cuda.Stream()):
                target.copy_(made, non_blocking=True)
            node.devices[0].running.clear()
            made.add_(1)
            waiting = begin(torch.cuda.synchronize)
            await_call(node, "synchronize")
        with pytest.raises(torch.AcceleratorError, match="driver shutting down"):
            waiting.result(PATIENCE_S)
        eventually("no thread is left", lambda: set(threading.enumerate()) == threads)
        assert is_full_of(target, 0)
