"""Tests that the simulated node is no kinder than CUDA and torch are by their documents.

Only rules have a test whose breach would hide a fault of the package. If the node were stricter
than its sources, the tests that use it would fail. Docstrings name the sources: "Guide" is the CUDA
C Programming Guide, "API" the reference of the CUDA Runtime API; files are those of pytorch.
"""

from __future__ import annotations

import contextlib
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


# ---------------------------------------------------------------------- devices and streams


def test_device_and_current_stream_are_per_thread(node: Node) -> None:
    """API, cudaSetDevice; c10/cuda/CUDAStream.h, "Stream pool note"."""
    torch.cuda.set_device(2)
    assert elsewhere(torch.cuda.current_device) == 0
    assert torch.cuda.current_device() == 2
    stream = torch.cuda.Stream(1)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream(1) is stream
        assert torch.cuda.current_stream(0) is torch.cuda.default_stream(0)
        there = elsewhere(lambda: torch.cuda.current_stream(1))
        assert there is torch.cuda.default_stream(1)


def test_a_failed_device_fails_every_later_call(node: Node) -> None:
    """API, cudaErrorIllegalAddress: any further work returns the error. (Here: on that device.)"""
    torch.cuda.set_device(1)
    made, event, stream = filled(1, "cuda:1"), torch.cuda.Event(), torch.cuda.Stream(1)
    event.record()
    node.devices[1].fail("an illegal memory access was encountered")
    calls: list[Callable[[], Any]] = [
        *(event.query, event.synchronize, stream.query, stream.synchronize),
        lambda: stream.wait_event(event),
        lambda: torch.cuda.Stream(1),
        lambda: torch.empty(1, device="cuda:1"),
        lambda: made.add_(1),
        lambda: made.cpu(),
        lambda: locked().copy_(made, non_blocking=True),
        lambda: made.copy_(torch.zeros(N, dtype=torch.uint8)),
        lambda: torch.cuda.set_device(1),
    ]
    for call in (*calls, torch.cuda.synchronize, event.record):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            call()
    torch.cuda.set_device(0)
    for call in calls:
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            call()


def test_work_runs_later_and_in_order_on_independent_streams(node: Node) -> None:
    """Guide, "Asynchronous Concurrent Execution", "Streams"."""
    with node.devices[0].held():
        made = torch.full((N,), 3, device="cuda")
        made.mul_(5)
        made.add_(1)
        assert not torch.cuda.current_stream().query()
    assert made.tolist() == [16] * N
    assert torch.cuda.current_stream().query()
    go, side = threading.Event(), torch.cuda.Stream()
    keep_busy(torch.cuda.current_stream(), go)
    with torch.cuda.stream(side):
        made.add_(1)
    side.synchronize()
    assert not torch.cuda.current_stream().query()
    go.set()
    assert made.tolist() == [17] * N


def test_an_operation_runs_on_the_stream_of_its_tensors_device(node: Node) -> None:
    """torchgen (`OptionalDeviceGuard` of the tensor) with c10/cuda/CUDAStream.h."""
    made, stream_of_0 = filled(1, "cuda:1"), torch.cuda.Stream(0)
    with node.devices[1].held(), torch.cuda.stream(stream_of_0):
        made.add_(1)
        assert not torch.cuda.default_stream(1).query()
        stream_of_0.synchronize()
    assert made.tolist() == [2] * N


def test_an_operation_on_tensors_of_two_devices_is_refused(node: Node) -> None:
    """aten/src/ATen/TensorIterator.cpp `compute_types`; a host number is read at the call."""
    for other in (filled(1, "cuda:1"), torch.ones(N)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            filled(1) + other
    number = torch.tensor(2.0)
    made = torch.ones(N, device="cuda")
    with node.devices[0].held():
        made.mul_(number)
        number.fill_(7)
    assert made.tolist() == [2.0] * N


def test_the_33rd_stream_is_the_first_again(node: Node) -> None:
    """c10/cuda/CUDAStream.h, "Stream pool note": 32 streams per device and priority, in turn."""
    streams = [torch.cuda.Stream() for _ in range(POOL_SIZE + 1)]
    assert streams[POOL_SIZE] is streams[0]
    assert len(set(streams)) == POOL_SIZE == 32
    assert torch.cuda.Stream(1) not in streams


def test_a_device_is_synchronized_with_all_its_streams(node: Node) -> None:
    """API, cudaDeviceSynchronize: it blocks until all preceding tasks are complete."""
    side, go = torch.cuda.Stream(), threading.Event()
    keep_busy(side, go)
    waiting = begin(torch.cuda.synchronize)
    await_call(node, "synchronize")
    assert not waiting.done()
    go.set()
    waiting.result(PATIENCE_S)
    assert side.query()


# ---------------------------------------------------------------------- copies
# API, "API synchronization behavior", Memcpy, unless another source is named.


def test_a_copy_reads_its_source_when_it_runs(node: Node) -> None:
    """Guide, "Streams": nothing orders a copy with a kernel of another stream."""
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


def test_a_non_blocking_copy_of_locked_memory_returns_early(node: Node) -> None:
    target, source = torch.zeros(N, dtype=torch.uint8), locked()
    assert torch.cuda.cudart().cudaHostRegister(target.data_ptr(), N, 0) == SUCCESS
    made, other = filled(1), filled(0)
    with node.devices[0].held():
        target.copy_(made, non_blocking=True)
        torch._foreach_copy_([target], [made], non_blocking=True)
        assert is_full_of(target, 0)
        other.copy_(source, non_blocking=True)
        source.fill_(9)
    torch.cuda.synchronize()
    assert is_full_of(target, 1)
    assert other.tolist() == [9] * N


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_copy_into_pageable_memory_returns_when_complete(node: Node, non_blocking: bool) -> None:
    made, target = filled(1), torch.zeros(N, dtype=torch.uint8)
    with node.devices[0].held():
        copying = begin(lambda: target.copy_(made, non_blocking))
        await_call(node, "Stream.synchronize")
        assert not copying.done()
    copying.result(PATIENCE_S)
    assert is_full_of(target, 1)


def test_a_copy_from_pageable_memory_reads_it_at_the_call(node: Node) -> None:
    """The stream is synchronized, and the call returns when the bytes are in staging memory."""
    source, made = torch.ones(N, dtype=torch.uint8), filled(0)
    with node.devices[0].held():
        copying = begin(lambda: made.copy_(source, non_blocking=True))
        await_call(node, "Stream.synchronize")
        assert not copying.done()
        source.fill_(2)
    copying.result(PATIENCE_S)
    source.fill_(9)
    assert made.tolist() == [2] * N


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_copy_across_a_border_of_locked_memory_is_refused(node: Node, non_blocking: bool) -> None:
    """Pessimistic: API, cudaHostRegister, speaks of one range, and no document allows two."""
    host, runtime = torch.zeros(3 * N, dtype=torch.uint8), torch.cuda.cudart()
    for begins in (0, N):
        assert runtime.cudaHostRegister(host.data_ptr() + begins, N, 0) == SUCCESS
    made = filled(1)
    for begins in (N // 2, N + N // 2):  # of two registrations, and into pageable memory
        target = host[begins : begins + N]
        for one, other in ((target, made), (made, target)):
            with pytest.raises(torch.AcceleratorError, match="invalid argument"):
                one.copy_(other, non_blocking)
    host[N : 2 * N].copy_(made, non_blocking)
    torch.cuda.synchronize()
    assert host.tolist() == [0] * N + [1] * N + [0] * N


def test_copies_to_the_host_run_in_the_order_of_the_calls(node: Node) -> None:
    """Pessimistic: Guide, "Overlap of Data Transfer", has engines; here the host's is a queue."""
    big, small, side, go = filled(1), filled(2), torch.cuda.Stream(), threading.Event()
    keep_busy(side, go)
    with torch.cuda.stream(side):
        target = locked().copy_(big, non_blocking=True)
    item = begin(lambda: small[0].item())
    await_call(node, "Stream.synchronize")
    assert not item.done()
    assert node.devices[0].to_host.queued_nbytes == N + 1
    go.set()
    assert item.result(PATIENCE_S) == 2
    assert is_full_of(target, 1)
    assert node.devices[0].to_host.most_queued_nbytes == N + 1


@pytest.mark.parametrize("waits", [False, True])
def test_copies_of_the_stream_that_is_served_overtake_others_unless_they_wait(
    node: Node, waits: bool
) -> None:
    """Seen on an H100: while one stream has copies enqueued, no other stream is served."""
    node.d2h_bytes_per_s = N / 0.05
    made, small, side, other = filled(1), filled(2), torch.cuda.Stream(), torch.cuda.Stream()
    between, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    go, may_end = threading.Event(), threading.Event()
    keep_busy(side, go)
    keep_busy(other, may_end)
    with torch.cuda.stream(side):
        locked().copy_(made, non_blocking=True)
        torch.cuda.Event().record()  # no more than a mark
    locked().copy_(small, non_blocking=True)
    between.record()
    if waits:
        side.wait_stream(other)
    with torch.cuda.stream(side):
        locked().copy_(made, non_blocking=True)
        last.record()
    go.set()
    if waits:
        eventually("the small copy", between.query)
        assert not last.query()
    may_end.set()
    torch.cuda.synchronize()
    assert (between.elapsed_time(last) > 0) is waits


# ---------------------------------------------------------------------- events


def test_an_event_that_was_never_recorded_is_done(node: Node) -> None:
    """API, cudaEventQuery, cudaEventSynchronize and cudaStreamWaitEvent."""
    event = torch.cuda.Event()
    with node.devices[0].held():
        assert event.query()
        event.synchronize()
        event.wait()
    torch.cuda.synchronize()


def test_streams_of_other_devices_may_wait_for_an_event_but_not_record_it(node: Node) -> None:
    """torch/cuda/streams.py `Event`; c10/cuda/CUDAEvent.h `record`."""
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


def test_only_a_blocking_event_lets_the_thread_sleep(node: Node) -> None:
    """API, cudaEventSynchronize: without cudaEventBlockingSync the thread spins."""
    for blocking, name in ((True, "Event.synchronize"), (False, "spin")):
        event = torch.cuda.Event(blocking=blocking)
        event.record()
        event.synchronize()
        assert node.calls[-1].name == name


def test_elapsed_time_needs_two_completed_events(node: Node) -> None:
    """c10/cuda/CUDAEvent.h `elapsed_time`."""
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


# ---------------------------------------------------------------------- memory
# torch docs, "CUDA semantics", "Memory management", unless another source is named.


def test_freed_memory_goes_to_the_next_tensor_with_its_contents(node: Node) -> None:
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
    node: Node, is_recorded: bool
) -> None:
    """torch docs, `Tensor.record_stream`."""
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


def test_a_tensor_that_does_not_fit_raises_out_of_memory(node: Node) -> None:
    """Before that, the allocator gives back what it caches and tries again."""
    nbytes = node.devices[0].allocator.nbytes
    assert torch.cuda.mem_get_info() == (nbytes, nbytes)
    quarters = [filled(1, nbytes=nbytes // 4) for _ in range(4)]
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        filled(1)
    assert torch.cuda.mem_get_info() == (0, nbytes)
    del quarters
    with torch.cuda.stream(torch.cuda.Stream()):
        filled(1, nbytes=nbytes)
    assert node.devices[0].allocator.peak == nbytes


def test_the_driver_gets_memory_back_when_the_cache_is_emptied(node: Node) -> None:
    """torch docs, `torch.cuda.empty_cache`; API, cudaMemGetInfo."""
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


def test_a_range_is_registered_once_and_unregistered_by_its_base_address(node: Node) -> None:
    """API, cudaHostRegister (712) and cudaHostUnregister (713)."""
    host, runtime = torch.zeros(4 * N, dtype=torch.uint8), torch.cuda.cudart()
    address = host.data_ptr()
    assert runtime.cudaHostRegister(address + N, N, 0) == SUCCESS
    for begins, nbytes in ((N, N), (0, N + 1), (2 * N - 1, N), (0, 4 * N)):
        status = runtime.cudaHostRegister(address + begins, nbytes, 0)
        assert status == ALREADY_REGISTERED == 712
    assert runtime.cudaHostRegister(address, N, 0) == SUCCESS
    assert runtime.cudaHostRegister(address, 0, 0) == INVALID_VALUE == 1
    assert runtime.cudaHostUnregister(address + 1) == NOT_REGISTERED == 713
    assert runtime.cudaHostUnregister(address + N) == SUCCESS
    assert runtime.cudaHostUnregister(address + N) == NOT_REGISTERED
    assert runtime.cudaHostRegister(address + N, 2 * N, 0) == SUCCESS


def test_the_next_kernel_of_the_thread_raises_a_failure_once(node: Node) -> None:
    """API, cudaGetLastError; c10/cuda/CUDAException.h: torch asks behind every kernel launch."""
    host = torch.zeros(N, dtype=torch.uint8)
    made, node.runtime.failing_call = filled(1), 0
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), N, 0)
    elsewhere(lambda: made.add_(1))
    with pytest.raises(torch.AcceleratorError, match="CUDA error: out of memory"):
        made.add_(1)
    made.add_(1)
    assert made.tolist() == [3] * N


# ---------------------------------------------------------------------- graphs


@pytest.fixture
def event(node: Node) -> torch.cuda.Event:
    """Return a recorded event that is done."""
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return event


@contextlib.contextmanager
def broken_capture(node: Node, mode: str, refused: str) -> Iterator[Any]:
    """Capture; the work inside is refused, and the graph is lost (Guide, "Invalidation")."""
    with (
        pytest.raises(torch.AcceleratorError, match="due to a previous error during capture"),
        node.capture(mode) as graph,
        pytest.raises(torch.AcceleratorError, match=refused),
    ):
        yield graph


def test_kernels_are_recorded_and_run_at_replay(node: Node) -> None:
    """Guide, "Creating a Graph Using Stream Capture"; ATen/cuda/CUDAGraph.cpp `replay`."""
    made, target = filled(1), locked()
    assert not torch.cuda.is_current_stream_capturing()
    with node.capture() as graph:
        made.add_(1)
        target.copy_(made, non_blocking=True)
        assert torch.cuda.is_current_stream_capturing()
        assert not elsewhere(torch.cuda.is_current_stream_capturing)
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    assert is_full_of(target, 0)
    for value in (2, 3):
        graph.replay()
        torch.cuda.current_stream().synchronize()
        assert is_full_of(target, value)
    assert made.tolist() == [3] * N


def test_unsafe_calls_of_other_threads_fail_and_break_a_global_capture(
    node: Node, event: torch.cuda.Event
) -> None:
    """API, cudaThreadExchangeStreamCaptureMode: in global mode, the default."""
    stream, made = torch.cuda.default_stream(), filled(1)
    unsafe: list[Callable[[], Any]] = [
        *(event.query, event.synchronize, stream.query, stream.synchronize, made.cpu, locked),
        lambda: torch.cuda.synchronize(1),
        lambda: torch.empty(1, device="cuda"),
    ]
    for call in unsafe:
        with broken_capture(node, "global", "operation not permitted when stream is"):
            elsewhere(call)


def test_a_host_registration_by_another_thread_fails_with_a_status(node: Node) -> None:
    """API, cudaErrorStreamCaptureUnsupported (900); functions of the runtime return it."""
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


def test_a_wait_for_captured_work_is_refused_in_whatever_mode(node: Node) -> None:
    """Guide, "Prohibited and Unhandled Operations"; API, cudaErrorCapturedEvent (907)."""
    for call in (torch.cuda.synchronize, lambda: graph.stream.synchronize()):
        with broken_capture(node, "relaxed", "not permitted") as graph:
            elsewhere(lambda call=call: (exchange(RELAXED), call()))
    event = torch.cuda.Event()
    with broken_capture(node, "relaxed", "recorded in a capturing stream"):
        event.record()
        elsewhere(lambda: (exchange(RELAXED), event.query()))


def test_a_capture_that_waits_for_an_outside_event_breaks(
    node: Node, event: torch.cuda.Event
) -> None:
    """API, cudaErrorStreamCaptureIsolation (905)."""
    with broken_capture(node, "global", "uncaptured work in another stream"):
        event.wait()


def test_a_capture_refuses_copies_of_pageable_memory(node: Node) -> None:
    """aten/src/ATen/native/cuda/Copy.cu `copy_kernel_cuda`."""
    made, host = filled(1), torch.zeros(N, dtype=torch.uint8)
    with node.capture():
        for one, other in ((host, made), (made, host)):
            with pytest.raises(RuntimeError, match="unless the CPU tensor is pinned"):
                one.copy_(other, non_blocking=True)


# ---------------------------------------------------------------------- rules of the simulation


def test_the_context_restores_torch_and_ends_all_threads() -> None:
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


def test_the_context_ends_while_a_device_is_held() -> None:
    """Waiting threads get the error of a driver that shuts down, and queued work is dropped."""
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
