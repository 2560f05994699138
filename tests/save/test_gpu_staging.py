"""Staging on a GPU: when copies are enqueued, and the streams and threads that wait for them.

The GPU is `tests.simulated_gpu`, which follows CUDA's rules for order, threads and memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from megatron.core.timers import Timers

from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import SaveFailedError
from megatron_flashckpt.memory import cuda
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save import stager as stager_module
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.save.stager import Stager
from tests.save.test_stager import PATIENCE_S, Finish, bytes_at, raw
from tests.simulated_gpu import Node, simulated_gpus
from tests.support.staging import TensorCopy, stage
from tests.support.trainer import eventually

RANK = 5
PART = 1 << 20
#: Elements of a float tensor that fills one part.
PART_NUMEL = PART // 4
#: Duration of a copy that other work must not overtake.
COPY_S = 0.2


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node; device 5 is current in this thread, as Megatron sets it on local rank 5."""
    monkeypatch.setattr(stager_module, "PART_NBYTES", PART)
    with simulated_gpus(8) as made:
        torch.cuda.set_device(RANK)
        yield made


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = Slab.create(1, 0, 64 << 20, "0")
    yield made
    made.close()


@pytest.fixture
def unlocked(node: Node, slab: Slab) -> Iterator[Stager]:
    """A stager whose slab is not page-locked yet."""
    made = Stager()
    made.use(slab, device=RANK)
    yield made
    node.refusals.clear()
    made.close()


@pytest.fixture
def stager(unlocked: Stager) -> Stager:
    unlocked.pin(None)
    unlocked.wait_pinned()
    return unlocked


def copies(slab: Slab, tensors: list[torch.Tensor], early: int = 0) -> list[TensorCopy]:
    offset, made = slab.slots[0].data_offset, []
    for number, tensor in enumerate(tensors):
        made.append(TensorCopy(tensor, offset, number < early))
        offset += tensor.nbytes
    return made


def staged(slab: Slab, numel: int) -> torch.Tensor:
    start = slab.slots[0].data_offset
    return torch.frombuffer(bytearray(bytes_at(slab, start, 4 * numel)), dtype=torch.float32)


def save(
    slab: Slab, stager: Stager, tensors: list[torch.Tensor], early: int = 0
) -> BaseException | None:
    """Save `tensors`; return the error. The stager knows the rate of a part afterwards."""
    finish = Finish()
    stage(stager, copies(slab, tensors, early), finish)
    stager.wait()
    (error,) = finish.errors
    return error


# ---------------------------------------------------------------------- order


def test_the_step_waits_on_the_device_while_the_thread_continues(
    node: Node, slab: Slab, stager: Stager
) -> None:
    weight = torch.arange(1000.0, device="cuda")
    finish = Finish()
    with node.devices[RANK].held():
        stage(stager, copies(slab, [weight]), finish)
        stager.before_change()
        weight.mul_(2.0)
        assert finish.calls == [], "finish is called only when all is copied"
    stager.wait()
    assert finish.errors == [None]
    assert torch.equal(staged(slab, 1000), torch.arange(1000.0))
    assert torch.equal(weight.cpu(), 2 * torch.arange(1000.0))


def test_copies_run_after_the_work_that_training_enqueued_earlier(
    node: Node, slab: Slab, stager: Stager
) -> None:
    early, late = (torch.zeros(100, device="cuda") for _ in range(2))
    with node.devices[RANK].held():
        early.add_(1.0)
        late.add_(2.0)
        stage(stager, copies(slab, [early, late], early=1), Finish())
    stager.wait()
    assert torch.equal(staged(slab, 200), torch.tensor([1.0] * 100 + [2.0] * 100))


def test_tensors_that_the_next_forward_changes_are_copied_first(
    node: Node, slab: Slab, stager: Stager
) -> None:
    buffer, weight = (torch.ones(10, device="cuda") for _ in range(2))
    node.d2h_bytes_per_s = buffer.nbytes / COPY_S
    with node.devices[RANK].held():
        stage(stager, copies(slab, [buffer, weight], early=1), Finish())
        buffer.mul_(3.0)
    stager.wait()
    assert torch.equal(staged(slab, 20), torch.ones(20))
    assert torch.equal(buffer.cpu(), torch.full((10,), 3.0))


def test_the_host_waits_where_sources_are_in_host_memory(
    node: Node, slab: Slab, stager: Stager
) -> None:
    on_gpu, on_host = torch.ones(10, device="cuda"), torch.ones(10)
    stage(stager, copies(slab, [on_gpu, on_host]), Finish())
    stager.before_change()
    on_host.zero_()
    stager.wait()
    assert torch.equal(staged(slab, 20), torch.ones(20))


def test_a_captured_step_waits_outside_its_graph(node: Node, slab: Slab, stager: Stager) -> None:
    weight = torch.ones(10, device="cuda")
    finish = Finish()
    side = torch.cuda.Stream()
    stage(stager, copies(slab, [weight]), finish)
    with torch.cuda.stream(side), node.capture("global") as graph:
        stager.before_change()
        assert torch.equal(staged(slab, 10), torch.ones(10))
        weight.mul_(2.0)
    graph.replay()
    stager.wait()
    assert finish.errors == [None]
    assert torch.equal(weight.cpu(), torch.full((10,), 2.0))


def test_memory_that_training_frees_during_a_copy_is_not_overwritten(
    node: Node, slab: Slab, stager: Stager
) -> None:
    """Training frees memory by `untyped_storage().resize_(0)`, and the tensor object remains."""
    weight = torch.ones(PART_NUMEL, device="cuda")
    node.d2h_bytes_per_s = PART / COPY_S
    with node.devices[RANK].held():
        stage(stager, copies(slab, [weight]), Finish())
        eventually("the copy is enqueued", stager._current.begun.is_set)
        del weight.block
        other = torch.empty(PART_NUMEL, device="cuda")
        other.fill_(9.0)
    stager.wait()
    assert torch.equal(staged(slab, PART_NUMEL), torch.ones(PART_NUMEL))


# ---------------------------------------------------------------------- devices


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("device", [0, None])
def test_tensors_of_another_device_are_refused_and_named(
    node: Node, slab: Slab, device: int | None, early: int
) -> None:
    """Copies on another device would run on a stream for which no step waits."""
    stager = Stager()
    stager.use(slab, device=device)
    error = save(slab, stager, [torch.ones(10, device="cuda")], early)
    assert isinstance(error, SaveFailedError)
    ours = "no GPU" if device is None else "cuda:0"
    assert str(error) == (
        "tensors of this rank are on cuda:5, but the training thread's current device is "
        f"{ours}; call torch.cuda.set_device(5) before the first save"
    )
    assert torch.equal(staged(slab, 10), torch.zeros(10))
    stager.close()


def test_another_device_gets_a_new_stream(slab: Slab, unlocked: Stager) -> None:
    unlocked.use(slab, device=0)
    unlocked.use(slab, device=RANK)
    unlocked.pin(None)
    assert save(slab, unlocked, [torch.ones(10, device="cuda")]) is None
    assert torch.equal(staged(slab, 10), torch.ones(10))
    assert unlocked._stream.device.index == RANK


def test_our_threads_call_cuda_on_the_rank_s_device_and_never_spin(
    node: Node, slab: Slab, stager: Stager
) -> None:
    save(slab, stager, in_parts(6))
    ours = [call for call in node.calls if call.thread.startswith("flashckpt-")]
    assert {call.name for call in ours if call.device != RANK} == {"set_device"}
    names = {call.name for call in ours}
    assert "Event.synchronize" in names
    assert names.isdisjoint({"spin", "Stream.synchronize", "synchronize"})
    others = [torch.cuda.Stream() for _ in range(40)]
    assert stager._stream not in others, "training never uses the side stream"


# ---------------------------------------------------------------------- overlap


def called_by_us(node: Node, name: str) -> bool:
    return any(call.name == name for call in node.calls if call.thread.startswith("flashckpt-"))


def in_parts(count: int) -> list[torch.Tensor]:
    return [torch.full((PART_NUMEL,), float(n), device="cuda") for n in range(count)]


def test_with_one_connection_parts_do_not_wait_for_each_other_behind_kernels(
    node: Node, slab: Slab, stager: Stager
) -> None:
    """A part enqueued after another has ended would wait for all kernels launched meanwhile."""
    tensors = in_parts(10)
    save(slab, stager, tensors)
    node.has_one_connection = True
    kernel = threading.Event()
    torch.cuda.current_stream().enqueue(lambda: kernel.wait(PATIENCE_S))
    stage(stager, copies(slab, tensors), Finish())
    eventually("all parts are enqueued", stager._current.begun.is_set)
    assert node.devices[RANK].to_host.queued_nbytes == 10 * PART
    kernel.set()
    stager.wait()
    assert torch.equal(staged(slab, 10 * PART_NUMEL)[::PART_NUMEL], torch.arange(10.0))


def test_all_remaining_parts_are_enqueued_when_the_step_waits(
    node: Node, slab: Slab, stager: Stager
) -> None:
    tensors = in_parts(14)
    engine = node.devices[RANK].to_host
    node.d2h_bytes_per_s = PART / 0.05
    save(slab, stager, tensors)
    engine.most_queued_nbytes = 0
    stage(stager, copies(slab, tensors), Finish())
    with node.devices[RANK].held():
        left = engine.queued_nbytes
        waiting = threading.Thread(target=stager.before_change)
        waiting.start()
        # The copy thread may wait for one part, which the device must finish first.
        node.devices[RANK].running.set()
        waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert left <= 3 * PART
    assert engine.most_queued_nbytes > 6 * PART
    stager.wait()
    assert torch.equal(staged(slab, 14 * PART_NUMEL), torch.cat([t.cpu() for t in tensors]))


def waits_in(node: Node, work: Callable[[], object]) -> list[int]:
    """Return the bytes that were copied during each wait of this thread in `work`."""
    before, me = len(node.waits), threading.current_thread().name
    work()
    return [wait.copied_nbytes for wait in node.waits[before:] if wait.thread == me]


def test_small_copies_of_training_go_between_the_parts_of_a_save(
    node: Node, slab: Slab, stager: Stager
) -> None:
    """With two parts enqueued at all times, they would wait until the save has no more parts."""
    tensors, loss = in_parts(12), torch.tensor(3.5, device="cuda")
    node.d2h_bytes_per_s = PART / 0.05
    save(slab, stager, tensors)

    engine = node.devices[RANK].to_host

    def waited_for() -> int:
        begins = engine.copied_nbytes
        stage(stager, copies(slab, tensors), Finish())
        eventually("a part is copied", lambda: engine.copied_nbytes > begins)
        nbytes = sum(waits_in(node, loss.item))
        stager.wait()
        return nbytes

    # On a busy machine the simulated parts end late, so a whole save may have no gap.
    assert any(waited_for() < 4 * PART for _ in range(3))


def test_timers_of_training_do_not_wait_for_a_save(node: Node, slab: Slab, stager: Stager) -> None:
    """Stock Megatron synchronizes the device after every save (`Timer.stop`, `Timer.start`)."""
    parts = 50
    tensors = in_parts(parts)
    timers = Timers(0, "minmax")
    timers("interval-time", log_level=0).start()
    timers("interval-time").stop()
    timers("save-checkpoint", log_level=0).start()
    node.d2h_bytes_per_s = parts * PART / 0.7  # the copies take 700 ms in all
    save(slab, stager, tensors)

    finish = Finish()
    started = time.perf_counter()
    assert waits_in(node, lambda: stage(stager, copies(slab, tensors), finish)) == []
    in_timers = waits_in(node, timers("save-checkpoint").stop)
    in_timers += waits_in(node, timers("interval-time").start)
    assert sum(in_timers) < parts * PART / 10
    assert waits_in(node, stager.before_change) == [], "only the step waits; the thread continues"
    at_step: list[int] = []
    engine = node.devices[RANK].to_host
    torch.cuda.current_stream().enqueue(lambda: at_step.append(engine.queued_nbytes))
    tensors[-1].mul_(0.0)
    torch.cuda.current_stream().synchronize()
    assert at_step == [0], "the step waits for all remaining copies"
    assert time.perf_counter() - started >= 0.7
    stager.wait()
    assert finish.errors == [None]
    assert torch.equal(staged(slab, parts * PART_NUMEL)[-1], torch.tensor(49.0))


def test_the_figures_of_a_save_tell_what_the_step_waited_for(
    node: Node, slab: Slab, stager: Stager
) -> None:
    tensors = in_parts(10)
    node.d2h_bytes_per_s = PART / 0.03
    save(slab, stager, tensors)
    figures = stage(stager, copies(slab, tensors), Finish())
    assert not figures.are_known()
    stager.before_change()
    stager.before_change()  # as the torch optimizer inside of Megatron's, which also waits
    torch.cuda.current_stream().synchronize()
    stager.wait()
    assert figures.are_known()
    # The thread came to the step at once, so the step waited for nearly all copies.
    assert 0.2 < figures.step_wait_s() <= figures.seconds
    assert figures.nbytes == 10 * PART
    assert figures.part_bytes_per_s is not None
    assert 0 < figures.part_bytes_per_s <= PART / 0.03
    assert figures.locked_nbytes == figures.slab_nbytes == slab.geometry.nbytes


def test_a_gpu_that_fails_leaves_no_figures(node: Node, slab: Slab, stager: Stager) -> None:
    """Training gets the error by its own calls; the exit after it must not get another one."""
    figures = stage(stager, copies(slab, in_parts(3)), Finish())
    stager.before_change()
    stager.wait()
    node.devices[RANK].fail("an illegal memory access was encountered")
    assert figures.are_known()
    assert figures.failed


# ---------------------------------------------------------------------- page-locking


def test_no_copy_crosses_the_border_of_two_locked_chunks(
    node: Node, slab: Slab, unlocked: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = 3 << 18
    monkeypatch.setattr("megatron_flashckpt.memory.pinned_slab.CHUNK_NBYTES", chunk)
    monkeypatch.setattr("megatron_flashckpt.memory.runs.CHUNK_NBYTES", chunk)
    node.runtime.failing_call = 4  # the rest is not locked
    unlocked.pin(None)
    unlocked.wait_pinned()
    tensors = [torch.rand(numel).to(dtype) for dtype in (torch.float32, torch.bfloat16)
               for numel in (700_001, 3, 130_000, 600_000)]  # fmt: skip
    finish = Finish()
    stage(unlocked, copies(slab, [tensor.cuda() for tensor in tensors], early=3), finish)
    unlocked.wait()
    assert finish.errors == [None]
    whole = b"".join(map(raw, tensors))
    assert bytes_at(slab, slab.slots[0].data_offset, len(whole)) == whole


def test_page_locking_no_longer_pauses_once_a_save_has_begun(
    node: Node, slab: Slab, unlocked: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its pauses leave the driver to training."""
    monkeypatch.setattr("megatron_flashckpt.memory.pinned_slab.CHUNK_NBYTES", 1 << 20)
    monkeypatch.setattr("megatron_flashckpt.memory.pinned_slab._PAUSE_PER_CALL", 1e9)
    unlocked.pin(None)
    eventually("a chunk is locked", lambda: node.runtime.locked)
    assert sum(node.runtime.locked.values()) == 1 << 20
    save(slab, unlocked, in_parts(1))
    eventually("all is locked", lambda: sum(node.runtime.locked.values()) == slab.geometry.nbytes)


def test_a_slab_is_unlocked_when_replaced_but_not_at_exit(
    node: Node, slab: Slab, stager: Stager
) -> None:
    locked = dict(node.runtime.locked)
    other = Slab.create(1, 0, 1 << 21, "other")
    stager.use(other, device=RANK)
    assert node.runtime.locked == {}
    stager.pin(None)
    stager.wait_pinned()
    assert list(node.runtime.locked.values()) == [other.geometry.nbytes]
    assert sum(locked.values()) == slab.geometry.nbytes
    stager.close()
    assert list(node.runtime.locked.values()) == [other.geometry.nbytes]
    assert {thread for _, thread, _ in node.runtime.registered_by} == {"flashckpt-pin"}
    other.close()


def test_a_slab_stays_mapped_and_locked_during_copies_into_it(
    node: Node, slab: Slab, stager: Stager
) -> None:
    finish = Finish()
    dropping = threading.Thread(target=stager.drop_slab)
    with node.devices[RANK].held():
        stage(stager, copies(slab, in_parts(1)), finish)
        dropping.start()
        dropping.join(0.1)
        assert dropping.is_alive()
        assert sum(node.runtime.locked.values()) == slab.geometry.nbytes
    dropping.join(PATIENCE_S)
    assert finish.errors == [None]
    assert node.runtime.locked == {}


# ---------------------------------------------------------------------- graphs


def test_training_captures_whole_graphs_during_a_save(node: Node, slab: Slab) -> None:
    stager = Stager()
    weight, tensors = torch.ones(10, device="cuda"), in_parts(20)
    errors: list[BaseException | None] = []

    def save_again_and_again() -> None:
        cuda.enter_thread(RANK)
        for _ in range(5):
            finish = Finish()
            stager.use(slab, device=RANK)
            stager.pin(None)
            stage(stager, copies(slab, tensors), finish)
            stager.wait()
            errors.extend(finish.errors)

    saving = threading.Thread(target=save_again_and_again, name="flashckpt-prepare")
    saving.start()
    side, captures = torch.cuda.Stream(), 0
    while saving.is_alive():
        with torch.cuda.stream(side), node.capture("global"):
            weight.mul_(2.0)
        captures += 1
    assert captures > 5
    assert errors == [None] * 5
    stager.close()


# ---------------------------------------------------------------------- failures

#: If this call is refused, the save succeeds, but captures of training may fail.
CAPTURE_MODE = "cudaThreadExchangeStreamCaptureMode"
CALLS_OF_A_SAVE = (
    *("set_device", "Stream.wait_event", "Event.record", "copy to host", "Event.synchronize"),
    *("Event.query", CAPTURE_MODE),
)


def refuse() -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("name", CALLS_OF_A_SAVE)
@pytest.mark.parametrize("early", [0, 2])
def test_a_save_reports_a_failed_cuda_call_and_training_continues(
    node: Node, slab: Slab, stager: Stager, name: str, early: int
) -> None:
    tensors = in_parts(4)
    node.refusals[name] = refuse
    finish = Finish()
    stage(stager, copies(slab, tensors, early), finish)
    stager.before_change()
    assert stager.wait(PATIENCE_S)
    (error,) = finish.errors
    assert "illegal memory access" in str(error) or (name, error) == (CAPTURE_MODE, None)
    node.refusals.clear()
    again = Finish()
    stage(stager, copies(slab, tensors, early), again)
    stager.before_change()
    assert stager.wait(PATIENCE_S)
    assert again.errors == [None]
    assert torch.equal(staged(slab, 4 * PART_NUMEL)[::PART_NUMEL], torch.arange(4.0))


def test_a_failed_save_ends_after_its_last_running_copy(
    node: Node, slab: Slab, stager: Stager
) -> None:
    """After its end the slab may be unmapped, so a running copy would write to foreign memory."""
    save(slab, stager, in_parts(2))
    calls = 0

    def refuse_the_second() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            refuse()

    node.refusals["copy to host"] = refuse_the_second
    finish = Finish()
    with node.devices[RANK].held():
        stage(stager, copies(slab, in_parts(2)), finish)
        eventually("the second copy is refused", lambda: calls > 1)
        assert not stager.wait(0.1)
        assert finish.calls == []
    stager.wait()
    (error,) = finish.errors
    assert "illegal memory access" in str(error)


def test_the_list_of_calls_of_a_save_is_complete(node: Node, slab: Slab, stager: Stager) -> None:
    tensors = in_parts(4)
    before = len(node.calls)
    stage(stager, copies(slab, tensors, early=2), Finish())
    stager.before_change()
    stager.wait()
    assert {call.name for call in node.calls[before:]} == set(CALLS_OF_A_SAVE)


def test_the_host_waits_if_the_device_refuses_to_wait(
    node: Node, slab: Slab, stager: Stager, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.ones(10, device="cuda")
    stage(stager, copies(slab, [weight]), Finish())
    eventually("the copies", lambda: stager._current.copied.is_set())
    node.refusals["Stream.wait_event"] = refuse
    stager._current.copied.clear()  # as if the copies were still running
    threading.Timer(0.1, stager._current.copied.set).start()
    stager.before_change()
    assert "the GPU cannot wait for a save's copies (" in caplog.text


def test_the_error_names_a_gpu_that_refuses_a_stream(node: Node, slab: Slab) -> None:
    stager = Stager()
    node.refusals["Stream"] = refuse
    with pytest.raises(SaveFailedError, match=r"cuda:5 cannot create a stream .* another GPU"):
        stager.use(slab, device=RANK)
    node.refusals.clear()
    stager.use(slab, device=RANK)
    assert save(slab, stager, [torch.ones(10, device="cuda")]) is None
    stager.close()


@pytest.mark.parametrize("how", ["hangs", "fails for good"])
def test_an_exit_after_a_crash_does_not_wait_for_a_gpu(
    node: Node, slab: Slab, tmp_path: Path, how: str
) -> None:
    link, finish = NodeLink(str(tmp_path), RANK, Config()), Finish()
    stager = link.stager
    stager.use(slab, device=RANK)
    stager.pin(None)
    stager.wait_pinned()
    if how == "hangs":
        node.devices[RANK].running.clear()
    stage(stager, copies(slab, in_parts(5)), finish)
    if how != "hangs":
        node.devices[RANK].fail("an illegal memory access was encountered")
    started = time.monotonic()
    link.abandon()
    assert time.monotonic() - started < 5.0
    assert finish.errors != [None]
    node.devices[RANK].running.set()
    NodeLink(str(tmp_path), RANK, Config()).close(leave=False)
    assert not stager._thread.is_alive()


def test_no_copy_is_lost_when_a_crash_leaves_the_gpu_alive(
    node: Node, slab: Slab, tmp_path: Path
) -> None:
    link, finish = NodeLink(str(tmp_path), RANK, Config()), Finish()
    link.stager.use(slab, device=RANK)
    stage(link.stager, copies(slab, in_parts(5)), finish)
    link.abandon()
    assert finish.errors == [None]
    assert torch.equal(staged(slab, 5 * PART_NUMEL)[::PART_NUMEL], torch.arange(5.0))
