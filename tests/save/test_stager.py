"""Copies of a save: early before `stage` returns, late before `wait` does, errors to `finish`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_flashckpt.memory.runs import Copy
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save.stager import Stager
from tests.support.processes import times_mapped

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
        self.thread = ""

    def __call__(self, seconds: float, error: BaseException | None) -> None:
        self.calls.append((seconds, error))
        self.thread = threading.current_thread().name


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = Slab.create(1, 0, 1 << 20, "0")
    yield made
    made.close()


@pytest.fixture
def stager(slab: Slab) -> Iterator[HeldStager]:
    made = HeldStager()
    made.use(slab, device=None)
    yield made
    made.gate.set()
    made.close()


def bytes_at(slab: Slab, offset: int, nbytes: int) -> bytes:
    return slab.memory[offset : offset + nbytes]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def test_when_stage_returns_only_early_copies_are_made(slab: Slab, stager: HeldStager) -> None:
    offset = slab.slots[0].data_offset
    early, late = torch.arange(100.0), torch.arange(100.0) + 1000
    finish = Finish()
    stager.stage([Copy(late, offset + 400, False), Copy(early, offset, True)], finish)
    assert bytes_at(slab, offset, 400) == raw(early)
    assert bytes_at(slab, offset + 400, 400) == bytes(400)
    early.zero_()  # as the next forward may do
    assert finish.calls == []
    stager.gate.set()
    stager.wait()
    assert bytes_at(slab, offset, 400) == raw(torch.arange(100.0))
    assert bytes_at(slab, offset + 400, 400) == raw(late)


def test_wait_returns_after_late_copies_and_the_call_of_finish(
    slab: Slab, stager: HeldStager
) -> None:
    offset = slab.slots[0].data_offset
    late = torch.arange(50.0)
    finish = Finish()
    stager.stage([Copy(late, offset, False)], finish)
    waiting = threading.Thread(target=stager.wait)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    stager.gate.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert bytes_at(slab, offset, 200) == raw(late)
    ((seconds, error),) = finish.calls
    assert error is None
    assert seconds >= 0
    assert finish.thread == "flashckpt-stage", "the training thread does not wait for it"


def test_training_continues_after_the_copies_and_the_next_save_after_finish(
    slab: Slab, stager: HeldStager
) -> None:
    offset = slab.slots[0].data_offset
    finishing, answered = threading.Event(), threading.Event()

    def finish(seconds: float, error: BaseException | None) -> None:
        finishing.set()
        assert answered.wait(PATIENCE_S)

    stager.gate.set()
    stager.stage([Copy(torch.arange(50.0), offset, False)], finish)
    stager.wait_copied()
    assert bytes_at(slab, offset, 200) == raw(torch.arange(50.0))
    assert finishing.wait(PATIENCE_S)
    waiting = threading.Thread(target=stager.wait)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    answered.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_training_does_not_wait_if_all_copies_were_early(slab: Slab, stager: HeldStager) -> None:
    offset = slab.slots[0].data_offset
    finish = Finish()
    stager.stage([Copy(torch.ones(4), offset, True)], finish)
    stager.wait_copied()
    assert finish.calls == [], "wait_copied does not wait for finish"
    stager.gate.set()
    stager.wait()
    assert len(finish.calls) == 1


#: Types and numbers of elements of pieces in their order in the slot, and the gaps before them.
PIECES = {
    "any type": [
        *((torch.float32, 0, 0), (torch.float32, 3, 0), (torch.int32, 6, 0)),
        *((torch.bfloat16, 0, 0), (torch.bfloat16, 3, 0), (torch.bfloat16, 6, 2)),
        *((torch.bfloat16, 0, 0), (torch.uint8, 3, 0)),
    ],
    "large and small": [
        *((torch.float32, 200_000, 0), (torch.float32, 7, 0), (torch.float32, 0, 0)),
        *((torch.bfloat16, 1, 0), (torch.bfloat16, 60_001, 0)),
    ],
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_pieces_adjacent_or_not_land_at_their_offsets(
    slab: Slab, stager: HeldStager, pieces: list[tuple[torch.dtype, int, int]], early: bool
) -> None:
    """The stager copies many small pieces with another call than large pieces."""
    stager.gate.set()
    position = slab.slots[0].data_offset
    copies = []
    for dtype, numel, gap in pieces:
        position += gap
        copies.append(Copy((100 * torch.rand(numel)).to(dtype), position, early))
        position += copies[-1].source.nbytes
    stager.stage(copies, Finish())
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
    stager.gate.set()
    position = slab.slots[0].data_offset
    first, last, source = torch.randn(3), torch.randn(120), torch.randn(100)
    expected = {position: first}
    copies = [Copy(first, position, early)]
    position += first.nbytes
    for start, end, gap in ranges:
        position += gap
        copies.append(Copy(source, position, early, start, end))
        expected[position] = source[start:end]
        position += 4 * (end - start)
    copies.append(Copy(last, position, early, ranges[-1][1], 120))  # begins where `source` ended
    expected[position] = last[ranges[-1][1] :]
    figures = stager.stage(copies, Finish())
    stager.wait()
    assert figures.nbytes == sum(tensor.nbytes for tensor in expected.values())
    for offset, tensor in expected.items():
        assert bytes_at(slab, offset, tensor.nbytes) == raw(tensor)
    assert bytes_at(slab, position + expected[position].nbytes, 64) == bytes(64)


@pytest.mark.parametrize("early", [True, False])
def test_the_stager_keeps_no_copied_tensor_alive(
    slab: Slab, stager: HeldStager, early: bool
) -> None:
    """Training may have moved the tensor; the stager must not keep its old device memory in use."""
    stager.gate.set()
    source = torch.ones(64)
    memory = weakref.ref(source.untyped_storage())
    stager.stage([Copy(source, slab.slots[0].data_offset, early)], Finish())
    stager.wait()
    assert memory() is not None
    del source
    assert memory() is None


def test_a_second_stage_waits_for_the_first(slab: Slab, stager: HeldStager) -> None:
    offset = slab.slots[0].data_offset
    order: list[str] = []
    stager.stage([Copy(torch.ones(4), offset, False)], lambda *_: order.append("first"))

    def second() -> None:
        stager.stage([Copy(torch.full((4,), 2.0), offset, True)], lambda *_: order.append("second"))
        order.append("staged second")

    thread = threading.Thread(target=second)
    thread.start()
    thread.join(0.2)
    assert order == []
    assert bytes_at(slab, offset, 16) == bytes(16), "early copies wait too"
    stager.gate.set()
    thread.join(PATIENCE_S)
    stager.wait()
    assert order[0] == "first"
    assert sorted(order[1:]) == ["second", "staged second"]
    assert bytes_at(slab, offset, 16) == raw(torch.full((4,), 2.0))


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8),
        *(torch.int64, torch.bool, torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_every_element_type_is_copied_bit_for_bit(
    slab: Slab, stager: HeldStager, dtype: torch.dtype, early: bool
) -> None:
    stager.gate.set()
    offset = slab.slots[0].data_offset
    source = torch.randint(0, 2, (64,), dtype=torch.uint8)
    if dtype != torch.bool:
        source = torch.randint(0, 256, (64,), dtype=torch.uint8)  # includes NaNs
    source = source.view(dtype)
    stager.stage([Copy(source, offset + 64, early)], Finish())
    stager.wait()
    assert bytes_at(slab, offset + 64, 64) == raw(source)
    assert bytes_at(slab, offset, 64) == bytes(64)
    assert bytes_at(slab, offset + 128, 64) == bytes(64)


def test_saves_without_late_or_any_copies_are_finished_too(slab: Slab, stager: HeldStager) -> None:
    stager.gate.set()
    for copies in ([Copy(torch.ones(1), slab.slots[0].data_offset, True)], []):
        finish = Finish()
        stager.stage(copies, finish)
        stager.wait()
        assert [error for _, error in finish.calls] == [None]


@pytest.mark.parametrize("early", [True, False])
def test_an_error_in_a_copy_reaches_finish_and_the_next_stage_works(
    slab: Slab, stager: HeldStager, early: bool
) -> None:
    stager.gate.set()
    beyond = Copy(torch.ones(1000), slab.geometry.nbytes - 40, early)
    finish = Finish()
    stager.stage([beyond], finish)
    stager.wait()
    ((_, error),) = finish.calls
    assert isinstance(error, RuntimeError)
    succeeded = Finish()
    source = torch.arange(5.0)
    stager.stage([Copy(source, slab.slots[0].data_offset, early)], succeeded)
    stager.wait()
    assert [error for _, error in succeeded.calls] == [None]
    assert bytes_at(slab, slab.slots[0].data_offset, 20) == raw(source)


def test_no_late_copy_is_made_after_an_early_one_has_failed(slab: Slab, stager: HeldStager) -> None:
    stager.gate.set()
    offset = slab.slots[0].data_offset
    finish = Finish()
    beyond = Copy(torch.ones(1000), slab.geometry.nbytes - 40, True)
    stager.stage([beyond, Copy(torch.ones(5), offset, False)], finish)
    stager.wait()
    assert len(finish.calls) == 1
    assert bytes_at(slab, offset, 20) == bytes(20)


def test_a_finish_that_raises_does_not_end_the_copy_thread(
    slab: Slab, stager: HeldStager, caplog: pytest.LogCaptureFixture
) -> None:
    stager.gate.set()

    def broken(seconds: float, error: BaseException | None) -> None:
        raise OSError("the hand-over broke")

    stager.stage([], broken)
    stager.wait()
    assert "the hand-over broke" in caplog.text
    finish = Finish()
    stager.stage([], finish)
    stager.wait()
    assert len(finish.calls) == 1


def test_the_next_stage_uses_another_slab(slab: Slab, stager: HeldStager) -> None:
    stager.gate.set()
    other = Slab.create(1, 0, 1 << 16, "1")
    offset = slab.slots[0].data_offset
    stager.stage([Copy(torch.ones(4), offset, False)], Finish())
    stager.use(other, device=None)  # waits for running copies
    assert bytes_at(slab, offset, 16) == raw(torch.ones(4))
    stager.stage([Copy(torch.full((4,), 3.0), offset, False)], Finish())
    stager.wait()
    assert bytes_at(other, offset, 16) == raw(torch.full((4,), 3.0))
    assert bytes_at(slab, offset, 16) == raw(torch.ones(4))
    stager.use(slab, device=None)
    other.close()


def test_close_finishes_running_copies_and_joins_the_thread(slab: Slab) -> None:
    stager = HeldStager()
    stager.use(slab, device=None)
    offset = slab.slots[0].data_offset
    finish = Finish()
    stager.stage([Copy(torch.ones(4), offset, False)], finish)
    thread = stager._thread
    threading.Timer(0.1, stager.gate.set).start()
    stager.close()
    assert not thread.is_alive()
    assert len(finish.calls) == 1
    assert bytes_at(slab, offset, 16) == raw(torch.ones(4))
    stager.close()


def test_a_closed_slab_stays_mapped_until_the_stager_releases_it() -> None:
    slab = Slab.create(1, 0, 4096, "held")
    offset = slab.slots[0].data_offset
    stager = Stager()
    stager.use(slab, device=None)
    slab.close()
    finish = Finish()
    stager.stage([Copy(torch.ones(4), offset, False)], finish)
    stager.wait()
    assert [error for _, error in finish.calls] == [None]
    assert times_mapped("held") == 1
    stager.close()
    assert times_mapped("held") == 0


def test_a_failed_early_copy_is_known_before_the_copy_thread_runs(slab: Slab) -> None:
    """Otherwise a save without late copies counts as staged until the thread runs."""
    runs = threading.Event()

    class LateStager(Stager):
        def _perform(self, job: Any) -> None:
            assert runs.wait(PATIENCE_S)
            super()._perform(job)

    made = LateStager()
    made.use(slab, device=None)
    outside = Copy(torch.zeros(8), 1 << 30, True)
    figures = made.stage([outside], Finish())
    assert figures.are_known()
    assert figures.failed
    runs.set()
    made.close()
