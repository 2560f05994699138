"""Copies and parity that a node holds for others: combined, bounded, and complete or unused."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import pytest

from megatron_flashckpt.agent.peers import holdings
from megatron_flashckpt.agent.peers.holdings import HoldError, Holdings
from megatron_flashckpt.agent.peers.messages import Held
from megatron_flashckpt.agent.peers.topology import ParityGroup, Part
from megatron_flashckpt.agent.slot_bytes import SlotDescriptor
from megatron_flashckpt.catalog.lineage import History
from megatron_flashckpt.file_format.file_names import save_name
from megatron_flashckpt.file_format.run_object import Ancestor
from megatron_flashckpt.memory.slot import SlabGeometry

RUN = "000001-aaaa"


def save(iteration: int) -> str:
    return save_name(RUN, iteration)


def new_descriptor(rank: int, iteration: int, nbytes: int, slots: int = 2) -> SlotDescriptor:
    return SlotDescriptor(
        rank=rank,
        iteration=iteration,
        save_id=save(iteration),
        geometry=SlabGeometry(slots, 4096, 4096),
        meta_nbytes=0,
        data_nbytes=nbytes,
        meta_digest="",
        digests=(),
        memory_only=False,
    )


def give(
    held: Holdings,
    group: ParityGroup,
    rank: int,
    iteration: int,
    data: bytes,
    upto: int | None = None,
    slots: int = 2,
) -> bool:
    """Contribute the bytes of a rank's checkpoint in steps of 1,000."""
    descriptor = new_descriptor(rank, iteration, len(data), slots)
    if not held.begin(Part(group, 0, 1), descriptor):
        return False
    for start in range(0, len(data) if upto is None else upto, 1000):
        chunk = memoryview(data)[start : start + 1000]
        held.add(group, rank, descriptor.save_id, start, chunk)
    if upto is None:
        held.end(group, rank, descriptor.save_id)
    return True


def iterations(held: Holdings, rank: int) -> list[int]:
    return sorted(entry.label.iteration for entry in held.held_of(rank))


def test_a_copy_equals_the_bytes_that_were_sent() -> None:
    held, data = Holdings(), os.urandom(4567)
    assert give(held, (3,), 3, 10, data)
    (entry,) = held.held_of(3)
    assert entry == Held(Part((3,), 0, 1), new_descriptor(3, 10, 4567), ())
    assert held.read((3,), save(10), 100, 2000) == data[100:2100]
    assert held.held_of(4) == []


def test_parity_restores_each_contribution_and_needs_the_memory_of_the_largest() -> None:
    """The memory of a dropped save is used again, from zero."""
    held, group = Holdings(), (0, 1, 2)
    for iteration in (10, 20, 30):
        data = [os.urandom(nbytes) for nbytes in (5000, 1234, 7777)]
        for rank in (2, 0, 1):
            assert iteration not in iterations(held, 2), "complete only with the last part"
            give(held, group, rank, iteration, data[rank])
        assert held.held_of(1)[-1].others == ((0, 0, 5000), (2, 0, 7777))
        for lost in group:
            total = bytearray(held.read(group, save(iteration), 0, 8000))
            for rank in group:
                if rank != lost:
                    holdings.combine(total, 0, data[rank])
            assert total == data[lost].ljust(8000, b"\0")
    (records,) = held._records.values()
    assert [len(record.memory or b"") for record in records] == [7777, 7777]


def test_a_complete_save_is_evicted_only_when_every_place_holds_a_complete_save() -> None:
    """The sender's slots are the places of this node; the oldest place is used again."""
    held, data = Holdings(), os.urandom(3000)
    give(held, (0,), 0, 10, data)
    give(held, (0,), 0, 20, data, upto=2000)
    assert iterations(held, 0) == [10]
    give(held, (0,), 0, 30, data)
    assert iterations(held, 0) == [10, 30], "the incomplete save was evicted, not the complete one"
    give(held, (0,), 0, 40, data, slots=3)
    assert iterations(held, 0) == [10, 30, 40]
    with pytest.raises(HoldError, match="newer saves than that of iteration 35"):
        give(held, (0,), 0, 35, data, slots=1)
    give(held, (0,), 0, 50, data, slots=2)
    assert iterations(held, 0) == [40, 50], "a run with fewer slots leaves as few saves held"
    give(held, (0,), 0, 60, data[::-1], slots=1)
    assert iterations(held, 0) == [60]
    assert held.read((0,), save(60), 0, 3000) == data[::-1]


def test_another_part_of_the_same_save_replaces_the_former_part() -> None:
    """A run on fewer nodes divides each checkpoint into fewer parts."""
    held, data = Holdings(), os.urandom(3000)
    descriptor = new_descriptor(0, 10, len(data))
    assert held.begin(Part((0,), 0, 2), descriptor)
    held.add((0,), 0, save(10), 0, memoryview(data)[:1500])
    held.end((0,), 0, save(10))
    assert not held.begin(Part((0,), 0, 2), descriptor)
    assert give(held, (0,), 0, 10, data)
    (entry,) = held.held_of(0)
    assert entry.part == Part((0,), 0, 1)
    assert held.read((0,), save(10), 0, 3000) == data


def test_an_interrupted_contribution_invalidates_the_parity() -> None:
    given_up: list[tuple[int, set[int]]] = []
    held, group = Holdings(lambda *arguments: given_up.append(arguments)), (0, 1)
    give(held, group, 1, 10, b"b" * 3000)
    give(held, group, 0, 10, b"a" * 3000, upto=1000)
    assert given_up == []
    give(held, group, 0, 10, b"a" * 3000)
    assert given_up == [(10, {1})], "rank 1 must contribute again"
    assert iterations(held, 0) == []
    give(held, group, 1, 10, b"b" * 3000)
    assert iterations(held, 0) == [10]
    assert held.read(group, save(10), 0, 1) == bytes([ord("a") ^ ord("b")])


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda h: h.add((0,), 0, save(10), 500, memoryview(b"x")), "do not follow"),
        (lambda h: h.add((0,), 0, save(10), 0, memoryview(b"x" * 1001)), "do not follow"),
        (lambda h: h.add((0,), 1, save(10), 0, memoryview(b"x")), "took its place"),
        (lambda h: h.add((1,), 0, save(10), 0, memoryview(b"x")), "took its place"),
        (lambda h: h.end((0,), 0, save(10)), "not all of its bytes"),
        (lambda h: h.end((0,), 0, save(99)), "not all of its bytes"),
        (lambda h: h.read((0,), save(10), 0, 1), "took its place"),
    ],
)
def test_a_request_that_does_not_fit_is_declined(
    act: Callable[[Holdings], object], reason: str
) -> None:
    held = Holdings()
    held.begin(Part((0,), 0, 1), new_descriptor(0, 10, 1000))
    with pytest.raises(HoldError, match=reason):
        act(held)


def test_a_node_without_free_memory_declines_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Holdings()
    give(held, (0,), 0, 10, b"data")
    monkeypatch.setattr(holdings, "available_nbytes", lambda: 2**20)
    with pytest.raises(HoldError, match=r"\d\.0 MiB of memory left and needs 3\.0 GiB"):
        held.begin(Part((0,), 0, 1), new_descriptor(0, 20, 3 * 2**30))
    assert iterations(held, 0) == [10]


def test_a_run_drops_saves_of_other_histories_and_foreign_parity_groups() -> None:
    held = Holdings()
    for rank, iteration in ((0, 10), (0, 20), (1, 20), (2, 10)):
        give(held, (rank,), rank, iteration, b"data")
    held.resume_from(History("000002-bbbb", (Ancestor(RUN, 10),)), [(0,), (1,)])
    assert [iterations(held, rank) for rank in range(3)] == [[10], [], []]
    held.resume_from(History("000002-bbbb"), [(0,), (1,)])
    assert iterations(held, 0) == []


@pytest.mark.parametrize(
    "drop",
    [
        lambda held: held.resume_from(History("000002-bbbb"), [(0,)]),
        lambda held: held.resume_from(History(RUN), []),
        lambda held: [held.begin(Part((0,), 0, 1), new_descriptor(0, n, 4)) for n in (20, 30)],
        lambda held: [give(held, (0,), 0, n, b"x" * n) for n in (20, 30)],
    ],
    ids=["of another history", "of another group", "left unfinished", "too small"],
)
def test_a_separate_thread_frees_dropped_memory(
    drop: Callable[[Holdings], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers wait for an `OpenRun` request, and other nodes wait for `begin`."""
    freed: list[mmap.mmap | None] = []
    monkeypatch.setattr(holdings, "free", freed.append)
    held = Holdings()
    give(held, (0,), 0, 10, b"data")
    drop(held)
    assert len([memory for memory in freed if memory is not None and not memory.closed]) == 1
