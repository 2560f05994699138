"""Copies of a save: early before `stage` returns, late before `wait` does, errors to `finish`."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import EMPTY_HEADER, SlotHeader, SlotState
from megatron_flashckpt.save.hand_over import HandOver
from megatron_flashckpt.save.stager import Stager
from megatron_flashckpt.tracing import SAVE, Recorder
from tests.support.processes import times_mapped
from tests.support.staging import TensorCopy, stage

PATIENCE_S = 20.0


class HeldStager(Stager):
    """A stager whose late copies wait until `gate` is set; early copies run at once."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        super().__init__()

    def _copy_late(self, job: Any) -> None:
        assert self.gate.wait(PATIENCE_S)
        super()._copy_late(job)


class Finish:
    """A callback that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, BaseException | None]] = []

    def __call__(self, seconds: float, error: BaseException | None) -> None:
        self.calls.append((seconds, error))

    @property
    def errors(self) -> list[BaseException | None]:
        return [error for _, error in self.calls]


def eventually_none(memory: weakref.ref[Any]) -> bool:
    """Return whether the copy thread lets go of a save that it has handed over."""
    ends_at = time.monotonic() + PATIENCE_S
    while memory() is not None and time.monotonic() < ends_at:
        time.sleep(0.001)
    return memory() is None


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = Slab.create(1, 0, 1 << 20, "0")
    yield made
    made.close()


@pytest.fixture
def held(slab: Slab) -> Iterator[HeldStager]:
    made = HeldStager()
    made.use(slab, device=None)
    yield made
    made.gate.set()
    made.close()


@pytest.fixture
def stager(held: HeldStager) -> HeldStager:
    held.gate.set()
    return held


def bytes_at(slab: Slab, offset: int, nbytes: int) -> bytes:
    return slab.memory[offset : offset + nbytes]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def test_when_stage_returns_only_early_copies_are_made(slab: Slab, held: HeldStager) -> None:
    offset = slab.slots[0].data_offset
    early, late = torch.arange(100.0), torch.arange(100.0) + 1000
    finish = Finish()
    stage(held, [TensorCopy(late, offset + 400, False), TensorCopy(early, offset, True)], finish)
    assert bytes_at(slab, offset, 400) == raw(early)
    assert bytes_at(slab, offset + 400, 400) == bytes(400)
    early.zero_()  # as the next forward may do
    assert finish.calls == []
    held.gate.set()
    held.wait()
    assert bytes_at(slab, offset, 400) == raw(torch.arange(100.0))
    assert bytes_at(slab, offset + 400, 400) == raw(late)


def test_training_waits_for_the_copies_and_the_next_save_for_the_hand_over(
    slab: Slab, held: HeldStager
) -> None:
    offset = slab.slots[0].data_offset
    finishing, answered = threading.Event(), threading.Event()
    threads: list[str] = []

    def finish(seconds: float, error: BaseException | None) -> None:
        threads.append(threading.current_thread().name)
        finishing.set()
        assert answered.wait(PATIENCE_S)

    stage(held, [TensorCopy(torch.arange(50.0), offset, False)], finish)
    training, saving = (threading.Thread(target=wait) for wait in (held.wait_copied, held.wait))
    training.start()
    saving.start()
    training.join(0.2)
    assert training.is_alive()
    held.gate.set()
    training.join(PATIENCE_S)
    assert bytes_at(slab, offset, 200) == raw(torch.arange(50.0))
    assert finishing.wait(PATIENCE_S)
    saving.join(0.2)
    assert saving.is_alive()
    answered.set()
    saving.join(PATIENCE_S)
    assert not saving.is_alive()
    assert threads == ["flashckpt-stage"], "the training thread does not wait for it"


def test_a_wait_of_the_next_save_counts_in_its_own_call_only(slab: Slab, held: HeldStager) -> None:
    """Two lines that count one wait name twice what the job loses."""
    first, second = Recorder(), Recorder()
    copies = [TensorCopy(torch.ones(4), slab.slots[0].data_offset, False)]
    with first.recording(), first.phase(SAVE):
        stage(held, copies, Finish())
    threading.Timer(0.2, held.gate.set).start()
    with second.recording(), second.phase(SAVE):
        stage(held, copies, Finish())
    assert second.call_s >= 0.1
    assert first.step_s == 0.0


def test_training_does_not_wait_if_all_copies_were_early(slab: Slab, held: HeldStager) -> None:
    finish = Finish()
    stage(held, [TensorCopy(torch.ones(4), slab.slots[0].data_offset, True)], finish)
    held.wait_copied()
    assert finish.calls == []
    held.gate.set()
    held.wait()
    assert len(finish.calls) == 1


#: Types and numbers of elements of pieces in their order in the slot, and the gaps before them.
PIECES = {
    "any type": [
        *((torch.float32, 0, 0), (torch.float32, 3, 0), (torch.int32, 6, 0)),
        *((torch.bfloat16, 0, 0), (torch.bfloat16, 3, 0), (torch.bfloat16, 6, 2)),
        *((torch.bfloat16, 0, 0), (torch.uint8, 3, 0), (torch.bool, 9, 0), (torch.int8, 5, 7)),
        *((torch.float8_e4m3fn, 8, 0), (torch.float64, 4, 0), (torch.int64, 3, 0)),
        *((torch.float16, 7, 0),),
    ],
    "large and small": [
        *((torch.float32, 200_000, 0), (torch.float32, 7, 0), (torch.float32, 0, 0)),
        *((torch.bfloat16, 1, 0), (torch.bfloat16, 60_001, 0)),
    ],
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_pieces_adjacent_or_not_land_bit_for_bit_at_their_offsets(
    slab: Slab, stager: HeldStager, pieces: list[tuple[torch.dtype, int, int]], early: bool
) -> None:
    """The stager copies many small pieces with another call than large pieces."""
    position = slab.slots[0].data_offset
    copies = []
    for dtype, numel, gap in pieces:
        position += gap
        most = 2 if dtype == torch.bool else 256  # the random bytes include NaNs
        bits = torch.randint(0, most, (numel * dtype.itemsize,), dtype=torch.uint8)
        copies.append(TensorCopy(bits.view(dtype), position, early))
        position += bits.nbytes
    stage(stager, copies, Finish())
    stager.wait()
    for copy in copies:
        assert bytes_at(slab, copy.offset, copy.source.nbytes) == raw(copy.source)
    assert bytes_at(slab, position, 64) == bytes(64)


#: Ranges of one tensor of 100 elements in their order in the slot, and the gaps before them.
SECTIONS = {
    "whole": [(0, 40, 0), (40, 100, 0)],
    "the middle": [(10, 40, 0), (40, 90, 0)],
    "another order": [(40, 100, 0), (0, 40, 0)],
    "a gap in the tensor": [(0, 40, 0), (50, 100, 0)],
    "a gap in the slot": [(0, 40, 0), (40, 100, 8)],
    "twice": [(0, 40, 0), (0, 40, 0)],
    "empty": [(0, 40, 0), (40, 40, 0), (40, 100, 0)],
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("ranges", SECTIONS.values(), ids=SECTIONS)
def test_sections_of_one_tensor_land_at_their_offsets(
    slab: Slab, stager: HeldStager, ranges: list[tuple[int, int, int]], early: bool
) -> None:
    """Sections that follow each other in both memories are copied by one call."""
    position = slab.slots[0].data_offset
    first, last, source = torch.randn(3), torch.randn(120), torch.randn(100)
    expected = {position: first}
    copies = [TensorCopy(first, position, early)]
    position += first.nbytes
    for start, end, gap in ranges:
        position += gap
        copies.append(TensorCopy(source, position, early, start, end))
        expected[position] = source[start:end]
        position += 4 * (end - start)
    # The range begins where the last one of `source` ended.
    copies.append(TensorCopy(last, position, early, ranges[-1][1], 120))
    expected[position] = last[ranges[-1][1] :]
    figures = stage(stager, copies, Finish())
    stager.wait()
    assert figures.nbytes == sum(tensor.nbytes for tensor in expected.values())
    for offset, tensor in expected.items():
        assert bytes_at(slab, offset, tensor.nbytes) == raw(tensor)
    assert bytes_at(slab, position + expected[position].nbytes, 64) == bytes(64)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("early", [True, False])
def test_the_stager_keeps_no_copied_tensor_alive(
    slab: Slab, stager: HeldStager, early: bool, fails: bool
) -> None:
    """Training may have moved the tensor; the stager must not keep its old device memory in use.

    Megatron's --manual-gc switches the collector off, so an error must not hold it in a cycle.
    """
    source = torch.ones(64)
    memory = weakref.ref(source.untyped_storage())
    offset = slab.geometry.nbytes - 40 if fails else slab.slots[0].data_offset
    gc.disable()
    try:
        stage(stager, [TensorCopy(source, offset, early)], lambda *_: None)
        stager.wait()
        assert memory() is not None
        del source
        assert eventually_none(memory)
    finally:
        gc.enable()


def test_a_second_stage_waits_for_the_first(slab: Slab, held: HeldStager) -> None:
    offset = slab.slots[0].data_offset
    order: list[str] = []
    stage(held, [TensorCopy(torch.ones(4), offset, False)], lambda *_: order.append("first"))

    def second() -> None:
        stage(
            held,
            [TensorCopy(torch.full((4,), 2.0), offset, True)],
            lambda *_: order.append("second"),
        )
        order.append("staged second")

    thread = threading.Thread(target=second)
    thread.start()
    thread.join(0.2)
    assert order == []
    assert bytes_at(slab, offset, 16) == bytes(16), "early copies wait too"
    held.gate.set()
    thread.join(PATIENCE_S)
    held.wait()
    assert order[0] == "first"
    assert sorted(order[1:]) == ["second", "staged second"]
    assert bytes_at(slab, offset, 16) == raw(torch.full((4,), 2.0))


@pytest.mark.parametrize("early", [True, False])
def test_an_error_in_a_copy_ends_the_save_and_the_next_one_works(
    slab: Slab, stager: HeldStager, early: bool
) -> None:
    offset, source = slab.slots[0].data_offset, torch.arange(5.0)
    beyond = TensorCopy(torch.ones(1000), slab.geometry.nbytes - 40, early)
    failed = Finish()
    stage(stager, [beyond, TensorCopy(source, offset, False)], failed)
    stager.wait()
    (error,) = failed.errors
    assert isinstance(error, RuntimeError)
    assert bytes_at(slab, offset, 20) == bytes(20), "no copy is made after one that failed"
    succeeded = Finish()
    stage(stager, [TensorCopy(source, offset, early)], succeeded)
    stager.wait()
    assert succeeded.errors == [None]
    assert bytes_at(slab, offset, 20) == raw(source)


def test_a_failed_early_copy_is_known_before_the_copy_thread_runs(slab: Slab) -> None:
    """Otherwise a save without late copies counts as staged until the thread runs."""
    runs = threading.Event()

    class LateStager(Stager):
        def _perform(self, job: Any) -> None:
            assert runs.wait(PATIENCE_S)
            super()._perform(job)

    made = LateStager()
    made.use(slab, device=None)
    figures = stage(made, [TensorCopy(torch.zeros(8), 1 << 30, True)], Finish())
    assert figures.are_known()
    assert figures.failed
    runs.set()
    made.close()


def test_a_finish_that_raises_does_not_end_the_copy_thread(
    slab: Slab, stager: HeldStager, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(seconds: float, error: BaseException | None) -> None:
        raise OSError("the hand-over broke")

    finish = Finish()
    for hand_over in (broken, finish):
        stage(stager, [], hand_over)
        stager.wait()
    assert "the hand-over broke" in caplog.text
    assert finish.errors == [None]


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_slot_that_was_emptied_during_the_copy_is_not_handed_over(
    slab: Slab, *, is_emptied: bool
) -> None:
    """The agent empties it when another process of the rank connects."""
    slot, saves, client = slab.slots[0], mock.Mock(), mock.Mock()
    header = SlotHeader(SlotState.STAGING, 1, "a save", 0, 0)
    slot.set_header(EMPTY_HEADER if is_emptied else header)
    recorder = mock.Mock()
    recorder.record.return_value = ()
    HandOver(0, saves, client, slot, header, recorder, "computed", memory_only=False)(0.0, None)
    assert slot.header.state == (SlotState.EMPTY if is_emptied else SlotState.STAGED)
    assert client.staged.called is saves.handed_over.called is (not is_emptied)
    assert saves.copies_failed.called is is_emptied


def test_another_slab_and_the_end_wait_for_running_copies() -> None:
    stager, slabs = HeldStager(), [Slab.create(1, 0, 1 << 16, name) for name in "01"]
    offset = slabs[0].slots[0].data_offset
    for slab in slabs:
        stager.use(slab, device=None)
        stager.gate.clear()
        stage(stager, [TensorCopy(torch.ones(4), offset, False)], Finish())
        assert bytes_at(slab, offset, 16) == bytes(16)
        threading.Timer(0.1, stager.gate.set).start()
    thread = stager._thread
    stager.close()
    stager.close()
    assert not thread.is_alive()
    for slab in slabs:
        assert bytes_at(slab, offset, 16) == raw(torch.ones(4))
        slab.close()


def test_a_closed_slab_stays_mapped_until_the_stager_releases_it() -> None:
    slab = Slab.create(1, 0, 4096, "held")
    stager, finish = Stager(), Finish()
    stager.use(slab, device=None)
    slab.close()
    stage(stager, [TensorCopy(torch.ones(4), slab.slots[0].data_offset, False)], finish)
    stager.wait()
    assert finish.errors == [None]
    assert times_mapped("held") == 1
    stager.close()
    assert times_mapped("held") == 0
