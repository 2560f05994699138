"""Tests that the simulated node follows the documents of CUDA and torch: one per rule and source.

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

from tests.simulated_gpu import DeviceTensor, Node, simulated_gpus
from tests.simulated_gpu.node import POOL_SIZE, UNKNOWN
from tests.simulated_gpu.runtime import (
    ALREADY_REGISTERED,
    INVALID_VALUE,
    NOT_REGISTERED,
    OUT_OF_MEMORY,
    SUCCESS,
)
from tests.support.trainer import PATIENCE_S, eventually

T = TypeVar("T")

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
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

    def test_set_device_affects_only_the_calling_thread(self, node: Node) -> None:
        """Guide, "Device Selection": a host thread can set its device at any time; memory and
        kernels of that thread then go there."""
        elsewhere(lambda: torch.cuda.set_device(1))
        assert torch.cuda.current_device() == 0
        assert torch.empty(1, device="cuda").device == torch.device("cuda", 0)

    def test_set_device_accepts_the_same_arguments_as_torch(self, node: Node) -> None:
        """torch/cuda/__init__.py `set_device`: a negative index changes nothing, a device without
        an index is refused, and one that is not there is an error of the runtime."""
        torch.cuda.set_device("cuda:1")
        torch.cuda.set_device(-1)
        assert torch.cuda.current_device() == 1
        with pytest.raises(ValueError, match=r"Expected a torch\.device with a specified index"):
            torch.cuda.set_device("cuda")
        with pytest.raises(ValueError, match="Expected a cuda device, but got: cpu"):
            torch.cuda.set_device("cpu")
        with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal"):
            torch.cuda.set_device(3)

    def test_device_context_restores_the_former_device(self, node: Node) -> None:
        """torch/cuda/__init__.py `device`: it exchanges the thread's device and puts it back."""
        with torch.cuda.device(2):
            assert torch.cuda.current_device() == 2
        assert torch.cuda.current_device() == 0

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

    def test_a_failed_device_wakes_waiting_threads(self, node: Node) -> None:
        """Runtime API, cudaEventSynchronize and others: they may return error codes of previous,
        asynchronous launches."""
        with node.devices[0].held():
            waiting = begin(torch.cuda.synchronize)
            await_call(node, "synchronize")
            node.devices[0].fail("an illegal memory access was encountered")
            with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
                waiting.result(PATIENCE_S)

    def test_a_failing_kernel_breaks_its_device(self, node: Node) -> None:
        """Guide, "Error Checking": an error that is asynchronous is reported by a later call."""

        def fail() -> None:
            raise RuntimeError("out of bounds")

        node.current_stream().enqueue(fail)
        with pytest.raises(torch.AcceleratorError, match="RuntimeError: out of bounds"):
            torch.cuda.synchronize()

    def test_the_runtime_returns_the_error_of_a_failed_device(self, node: Node) -> None:
        """Runtime API: functions return an error code and raise nothing; 700 is
        cudaErrorIllegalAddress. torch/csrc/cuda/shared/cudart.cpp passes it on."""
        node.devices[0].fail("an illegal memory access was encountered")
        runtime = torch.cuda.cudart()
        assert runtime.cudaHostRegister(torch.zeros(N).data_ptr(), N, 0) == 700
        assert runtime.cudaHostUnregister(0) == 700
        assert exchange(RELAXED) == (700, RELAXED)


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

    def test_a_stream_context_switches_device_and_restores_both(self, node: Node) -> None:
        """torch/cuda/__init__.py `StreamContext`: it sets the stream and its device, without a
        word if that device is not the current one, and puts both back."""
        outer, inner = torch.cuda.Stream(0), torch.cuda.Stream(2)
        with torch.cuda.stream(outer):
            with torch.cuda.stream(inner):
                assert torch.cuda.current_device() == 2
                assert torch.cuda.current_stream() is inner
                assert torch.cuda.current_stream(0) is outer
            assert torch.cuda.current_device() == 0
            assert torch.cuda.current_stream() is outer
            assert torch.cuda.current_stream(2) is torch.cuda.default_stream(2)
        assert torch.cuda.current_stream() is torch.cuda.default_stream()

    def test_the_stream_context_of_none_changes_nothing(self, node: Node) -> None:
        """torch/cuda/__init__.py `StreamContext`: it is a no-op for None."""
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is torch.cuda.default_stream()

    def test_a_stream_names_its_device_as_torch_does(self, node: Node) -> None:
        """torch/_C/__init__.pyi `Stream`: `device` is a torch.device; without an argument it is
        the current one (torch/cuda/streams.py)."""
        torch.cuda.set_device(1)
        assert torch.cuda.Stream().device == torch.device("cuda", 1)
        assert torch.cuda.Stream("cuda:2").device == torch.device("cuda", 2)

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

    def test_nothing_is_done_while_a_device_is_held(self, node: Node) -> None:
        """Guide, "Asynchronous Concurrent Execution": the device may begin at any time; a held
        device represents one that is busy with other work."""
        there, here, target = filled(1, "cuda:1"), filled(1), locked()
        with node.devices[0].held():
            here.add_(1)
            target.copy_(here, non_blocking=True)
            there.add_(1)
            torch.cuda.synchronize(1)
            assert is_full_of(target, 0)
        torch.cuda.synchronize()
        assert is_full_of(target, 2)

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

    def test_wait_stream_orders_two_streams(self, node: Node) -> None:
        """torch/cuda/streams.py `wait_stream`: all future work of this stream waits for the work
        that was enqueued on the other stream before the call."""
        made, go, side = filled(1), threading.Event(), torch.cuda.Stream()
        keep_busy(torch.cuda.current_stream(), go)
        made.mul_(10)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            made.add_(1)
        assert not side.query()
        go.set()
        side.synchronize()
        assert made.tolist() == [11] * N

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

    def test_every_priority_has_a_pool_of_its_own(self, node: Node) -> None:
        """c10/cuda/CUDAStream.h (`max_compile_time_stream_priorities` is 4) and torch/cuda/
        streams.py `Stream`: a lower number is a higher priority; others become the nearest."""
        low, high, higher = (torch.cuda.Stream(priority=p) for p in (0, -1, -2))
        assert len({low, high, higher}) == 3
        assert [torch.cuda.Stream(priority=p).priority for p in (5, -1, -99)] == [0, -1, -3]


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

    def test_a_copy_does_not_see_later_work_of_its_stream(self, node: Node) -> None:
        """Guide, "Streams": the commands of one stream execute in order."""
        made, target = filled(1), locked()
        with node.devices[0].held():
            target.copy_(made, non_blocking=True)
            made.fill_(9)
        torch.cuda.synchronize()
        assert is_full_of(target, 1)

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

    def test_a_blocking_copy_into_locked_memory_returns_when_complete(self, node: Node) -> None:
        """c10/cuda/CUDAFunctions.h `memcpy_and_sync`: the copy is asynchronous, and then the
        stream is synchronized."""
        made, target = filled(1), locked()
        with node.devices[0].held():
            copying = begin(lambda: target.copy_(made))
            await_call(node, "Stream.synchronize")
            assert not copying.done()
        copying.result(PATIENCE_S)
        assert is_full_of(target, 1)

    def test_a_copy_into_strided_locked_memory_returns_when_complete(self, node: Node) -> None:
        """aten/src/ATen/native/cuda/Copy.cu `copy_kernel_cuda`: a host tensor that is not
        contiguous is copied through a temporary one, which is pageable."""
        made, target = filled(1), locked(2 * N)
        with node.devices[0].held():
            copying = begin(lambda: target[::2].copy_(made, non_blocking=True))
            await_call(node, "Stream.synchronize")
            assert not copying.done()
        copying.result(PATIENCE_S)
        assert is_full_of(target[::2], 1)

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

    def test_a_blocking_copy_to_the_device_returns_when_complete(self, node: Node) -> None:
        """c10/cuda/CUDAFunctions.h `memcpy_and_sync`: the stream is synchronized, so any other
        stream finds the bytes."""
        made, side = filled(0), torch.cuda.Stream()
        for value, source in ((1, torch.ones(N, dtype=torch.uint8)), (2, locked().fill_(2))):
            made.copy_(source)
            with torch.cuda.stream(side):
                assert made.tolist() == [value] * N

    def test_copies_between_devices_wait_for_both_streams(self, node: Node) -> None:
        """aten/src/ATen/native/cuda/Copy.cu `copy_device_to_device`: it runs on the stream of the
        source's device, between two barriers with that of the target's."""
        source, target = filled(1, "cuda:0"), filled(5, "cuda:1")
        with node.devices[0].held(), node.devices[1].held():
            target.add_(1)
            target.copy_(source, non_blocking=True)
            target.add_(1)
        assert target.tolist() == [2] * N

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

    def test_threads_that_copy_on_one_stream_do_not_deadlock(self, node: Node) -> None:
        """c10/cuda/CUDAStream.h, "Stream pool note": streams are thread safe."""
        made = filled(1)

        def copy() -> None:
            target = locked()
            for _ in range(100):
                target.copy_(made, non_blocking=True)

        threads = [begin(copy) for _ in range(4)]
        for thread in threads:
            thread.result(PATIENCE_S)
        elsewhere(torch.cuda.synchronize)


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

    def test_an_event_is_done_when_all_earlier_work_is_done(self, node: Node) -> None:
        """Runtime API, cudaEventRecord: the event captures the contents of the stream at the time
        of the call."""
        event, made = torch.cuda.Event(), filled(1)
        with node.devices[0].held():
            made.add_(1)
            event.record()
            assert not event.query()
        event.synchronize()
        assert event.query()
        assert is_full_of(made.backing, 2)  # type: ignore[attr-defined]

    def test_a_new_record_replaces_the_former_one(self, node: Node) -> None:
        """Runtime API, cudaEventRecord: a call on a recorded event replaces the captured state;
        later calls of cudaEventQuery look at the latest."""
        event, go = torch.cuda.Event(), threading.Event()
        event.record()
        torch.cuda.synchronize()
        assert event.query()
        keep_busy(torch.cuda.current_stream(), go)
        event.record()
        assert not event.query()
        go.set()
        event.synchronize()

    def test_a_wait_is_for_the_last_record_before_the_wait(self, node: Node) -> None:
        """Runtime API, cudaStreamWaitEvent: it waits for what was captured by then; a later
        cudaEventRecord does not concern it."""
        event, go, side = torch.cuda.Event(), threading.Event(), torch.cuda.Stream()
        event.record()
        side.wait_event(event)
        keep_busy(torch.cuda.current_stream(), go)
        event.record()
        side.synchronize()
        assert not event.query()
        go.set()

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

    def test_it_does_not_wait_for_other_devices(self, node: Node) -> None:
        """Runtime API, cudaDeviceSynchronize: it concerns the current device;
        torch/cuda/__init__.py `synchronize` makes its argument that."""
        with node.devices[1].held():
            filled(1, "cuda:0").add_(1)
            begin(lambda: filled(1, "cuda:1"))
            torch.cuda.synchronize()
            torch.cuda.synchronize(2)

    def test_it_does_not_wait_for_work_that_is_enqueued_later(self, node: Node) -> None:
        """Runtime API, cudaDeviceSynchronize: only *preceding* tasks count."""
        made, first, second = filled(1), threading.Event(), threading.Event()
        stream: Any = torch.cuda.current_stream()
        keep_busy(stream, first)
        waiting = begin(torch.cuda.synchronize)
        await_call(node, "synchronize")
        # The last of its marks is set when all of them are.
        eventually("marks", lambda: len(stream._pending) == 2)
        keep_busy(stream, second)
        made.add_(1)
        first.set()
        waiting.result(PATIENCE_S)
        assert not stream.query()
        second.set()


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

    def test_the_order_of_one_stream_makes_reuse_safe(self, node: Node) -> None:
        """torch docs, `Tensor.record_stream`: memory is reused safely for work of the stream on
        which it was allocated."""
        target, made = locked(), filled(7)
        address = made.data_ptr()
        with node.devices[0].held():
            target.copy_(made, non_blocking=True)
            del made
            again = torch.full((N,), 9, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        assert again.data_ptr() == address
        assert is_full_of(target, 7)

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

    def test_freed_memory_stays_with_its_stream(self, node: Node) -> None:
        """c10/cuda/CUDACachingAllocator.cpp, header comment: blocks are associated with one
        stream, and a freed block serves allocations on that stream only."""
        target, made, side = locked(), filled(7), torch.cuda.Stream()
        address, go = made.data_ptr(), threading.Event()
        keep_busy(torch.cuda.current_stream(), go)
        target.copy_(made, non_blocking=True)
        del made
        with torch.cuda.stream(side):
            other = torch.full((N,), 9, dtype=torch.uint8, device="cuda")
            side.synchronize()
        assert other.data_ptr() != address
        go.set()
        torch.cuda.synchronize()
        assert is_full_of(target, 7)

    def test_a_view_keeps_the_memory_of_its_base(self, node: Node) -> None:
        """torch docs, "Tensor Views": a view shares the memory of its base, which exists as long as
        any of them."""
        made = filled(7)
        view, address = made[N // 2 :].view(2, -1), made.data_ptr()
        del made
        assert torch.full((N,), 9, dtype=torch.uint8, device="cuda").data_ptr() != address
        assert view.tolist() == [[7] * (N // 4)] * 2
        assert node.devices[0].allocator.allocated == N

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

    def test_a_host_tensor_is_copied_to_the_current_device(self, node: Node) -> None:
        """torch docs, `Tensor.to`: a copy on that device; "cuda" is the current one."""
        torch.cuda.set_device(2)
        made = torch.arange(3).to("cuda")
        assert made.device == torch.device("cuda", 2)
        assert torch.equal(made.cpu(), torch.arange(3))
        assert made.cpu().to("cpu").device.type == "cpu"


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

    def test_a_registration_can_be_made_to_fail_by_size_or_number(
        self, node: Node, host: torch.Tensor
    ) -> None:
        """Runtime API, cudaErrorMemoryAllocation (2): not enough memory, or a limit of the kernel
        or driver. Nothing of the range is registered then."""
        runtime, address = node.runtime, host.data_ptr()
        runtime.most_nbytes, runtime.failing_call = N, 1
        assert torch.cuda.cudart() is runtime
        assert runtime.cudaHostRegister(address, N + 1, 0) == OUT_OF_MEMORY == 2
        assert runtime.cudaHostRegister(address, N, 0) == OUT_OF_MEMORY
        assert runtime.locked == {}
        assert runtime.cudaHostRegister(address, N, 0) == SUCCESS
        assert runtime.registered_by == [(N, threading.current_thread().name, 0)]

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

    def test_a_failed_pinned_allocation_raises_at_once_and_leaves_no_error(
        self, node: Node
    ) -> None:
        """c10/cuda/CUDAException.cpp `c10_cuda_check_implementation` takes the error out of the
        thread's state and raises it; `pin_memory=True` goes through `C10_CUDA_CHECK`."""
        made, node.runtime.most_nbytes = filled(1), N
        with pytest.raises(torch.AcceleratorError, match="CUDA error: out of memory"):
            locked(N + 1)
        made.add_(1)
        assert node.runtime.locked == {}
        assert node.runtime.is_locked(locked(N))

    @pytest.mark.parametrize(
        "launch",
        [
            lambda made: torch.zeros(1, device="cuda"),
            lambda made: made.copy_(made.view(-1)),
            lambda made: made + 1,
            lambda made: torch._foreach_add_([made], 1),
        ],
    )
    def test_every_kernel_launch_raises_a_pending_error(
        self, node: Node, launch: Callable[[torch.Tensor], Any]
    ) -> None:
        """c10/cuda/CUDAException.h `C10_CUDA_KERNEL_LAUNCH_CHECK`, and the end of
        `copy_device_to_device` (aten/src/ATen/native/cuda/Copy.cu)."""
        made = filled(1)
        torch.cuda.cudart().cudaHostUnregister(0)
        with pytest.raises(torch.AcceleratorError, match="does not correspond to a registration"):
            launch(made)
        launch(made)

    def test_copies_and_empty_tensors_raise_no_pending_error(self, node: Node) -> None:
        """c10/cuda/CUDAFunctions.h `memcpy_and_sync` looks at the status of its own calls;
        `torch.empty` launches nothing."""
        made = filled(1)
        torch.cuda.cudart().cudaHostUnregister(0)
        torch.empty_like(made)
        torch.empty(N, device="cuda")
        assert made[0].item() == 1
        with pytest.raises(torch.AcceleratorError):
            made.add_(1)


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

    def test_a_graph_keeps_the_memory_that_it_uses(self, node: Node) -> None:
        """torch docs, "CUDA Graphs", "Graph memory management": a capture allocates from a private
        pool, whose memory serves no other allocation."""
        made = filled(1)
        with node.capture() as graph:
            made.copy_(made * 2)
        others = [filled(9) for _ in range(8)]
        graph.replay()
        assert made.tolist() == [2] * N
        assert all(other.tolist() == [9] * N for other in others)

    def test_the_default_stream_is_not_captured(self, node: Node) -> None:
        """torch/cuda/graphs.py `graph`: it captures on a side stream, because ATen/cuda/
        CUDAGraph.cpp refuses the default stream."""
        with node.capture() as graph:
            assert torch.cuda.current_stream() is graph.stream
            assert graph.stream is not torch.cuda.default_stream()
        assert torch.cuda.current_stream() is torch.cuda.default_stream()

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

    @pytest.mark.parametrize("name", UNSAFE)
    def test_unsafe_calls_of_relaxed_threads_do_not_break_a_capture(
        self, node: Node, event: torch.cuda.Event, name: str
    ) -> None:
        """Runtime API, cudaThreadExchangeStreamCaptureMode: a relaxed thread is not prohibited
        from potentially unsafe calls."""
        call = self.call(name, event, filled(1))
        with node.capture():
            elsewhere(lambda: (exchange(RELAXED), call()))

    @pytest.mark.parametrize("name", UNSAFE)
    def test_a_thread_local_capture_does_not_affect_other_threads(
        self, node: Node, event: torch.cuda.Event, name: str
    ) -> None:
        """Runtime API, cudaThreadExchangeStreamCaptureMode: only captures that were begun in
        global mode concern other threads."""
        call = self.call(name, event, filled(1))
        with node.capture("thread_local"):
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

    def test_exchange_returns_the_former_capture_mode_of_the_thread(self, node: Node) -> None:
        """Runtime API, cudaThreadExchangeStreamCaptureMode: it swaps the mode of the calling
        thread with the value that the argument points at; a thread begins in global mode."""
        assert exchange(RELAXED) == (SUCCESS, GLOBAL)
        assert exchange(THREAD_LOCAL) == (SUCCESS, RELAXED)
        assert exchange(GLOBAL) == (SUCCESS, THREAD_LOCAL)
        assert exchange(7) == (INVALID_VALUE, 7)
        assert elsewhere(lambda: exchange(RELAXED)) == (SUCCESS, GLOBAL)

    def test_a_capturing_thread_may_relax_itself(self, node: Node, event: torch.cuda.Event) -> None:
        """c10/cuda/CUDAGraphsC10Utils.h `CUDAStreamCaptureModeGuard`: torch does so around its own
        calls; without it the local thread's capture prohibits them."""
        with node.capture():
            exchange(RELAXED)
            assert event.query()
            exchange(GLOBAL)
        with (
            pytest.raises(torch.AcceleratorError, match="previous error"),
            node.capture(),
            pytest.raises(torch.AcceleratorError, match="not permitted"),
        ):
            event.query()

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

    def test_a_broken_capture_accepts_no_more_work(
        self, node: Node, event: torch.cuda.Event
    ) -> None:
        """Guide, "Invalidation": further use of the capturing streams is invalid and returns an
        error until the capture is ended."""
        made = filled(1)
        with node.capture("relaxed") as graph:
            graph.broken_by = "an unsafe call"
            with pytest.raises(torch.AcceleratorError, match="capture: an unsafe call"):
                made.add_(1)
            graph.broken_by = None
        made.add_(1)
        assert made.tolist() == [2] * N

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
    def test_recorded_calls_name_thread_and_device(self, node: Node) -> None:
        """Rule of this simulation: it notes every call with its thread and that thread's current
        device, whatever device the call concerns."""
        made = filled(1, "cuda:2")

        def work() -> None:
            torch.cuda.set_device(1)
            made.cpu()

        begin(work, "copier").result(PATIENCE_S)
        calls = [(c.name, c.device) for c in node.calls if c.thread == "copier"]
        assert calls == [("set_device", 0), ("copy to host", 1), ("Stream.synchronize", 1)]

    def test_a_refusal_is_called_in_place_of_a_cuda_call(self, node: Node) -> None:
        """Rule of this simulation: a test may have any call raise; a function of the runtime
        turns an AcceleratorError into its status."""

        def refuse() -> None:
            raise torch.AcceleratorError("CUDA error: no")

        node.refusals = {"Event.record": refuse, "cudaHostUnregister": refuse}
        with pytest.raises(torch.AcceleratorError, match="CUDA error: no"):
            torch.cuda.Event().record()
        torch.cuda.synchronize()
        assert torch.cuda.cudart().cudaHostUnregister(0) == UNKNOWN == 999

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

    def test_the_context_ends_while_work_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rule of this simulation: `Node.close` waits for its threads a limited time."""
        monkeypatch.setattr("tests.simulated_gpu.node._CLOSE_S", 0.1)
        begun, go, threads = threading.Event(), threading.Event(), set(threading.enumerate())

        def hang() -> None:
            begun.set()
            go.wait()

        with simulated_gpus(1) as node:
            node.current_stream().enqueue(hang)
            assert begun.wait(PATIENCE_S)
        assert len(set(threading.enumerate()) - threads) == 1
        go.set()
        eventually("no thread is left", lambda: set(threading.enumerate()) == threads)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_compute_the_same_numbers_as_on_the_host(
    node: Node, optimizer: Any, foreach: bool
) -> None:
    """torch.optim: the same kernels, so the same numbers; here they are the host's, bit for bit."""

    def train(device: str) -> list[torch.Tensor]:
        weights = [torch.nn.Parameter(torch.arange(8.0, device=device) + i) for i in range(3)]
        steps = optimizer(weights, lr=0.1, weight_decay=0.1, foreach=foreach)
        for step in range(4):
            for weight in weights:
                weight.grad = torch.arange(8.0, device=device) * (step + 1)
            steps.step()
        states = [state for weight in weights for state in steps.state[weight].values()]
        kept = [*weights, *(state for state in states if isinstance(state, torch.Tensor))]
        on_device = [tensor for tensor in kept if tensor.dim()]
        assert {isinstance(tensor, DeviceTensor) for tensor in on_device} == {device != "cpu"}
        return [tensor.detach().cpu() for tensor in kept]

    expected = train("cpu")
    assert len(expected) == (12 if optimizer is torch.optim.AdamW else 3)
    result = train("cuda:1")
    assert all(map(torch.equal, result, expected))
    assert len(result) == len(expected)
