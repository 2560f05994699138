"""Slots: which one a save gets, and which checkpoints in memory are offered or dropped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt.agent.incarnations import RankProcess
from megatron_flashckpt.agent.rank_slots import RankSlots, only_in_memory
from megatron_flashckpt.catalog.lineage import History
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format.file_names import save_name
from megatron_flashckpt.file_format.run_object import Ancestor
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import COMPLETE, Slot, SlotHeader, SlotState
from tests.agent.conftest import Node
from tests.support.processes import open_files
from tests.support.trainer import PATIENCE_S, blocked_shard, new_save_id


@contextlib.contextmanager
def table(slots: int, *held: SlotState) -> Iterator[RankSlots]:
    """Return the table of a slab whose first slots hold iterations 0, 1, ... in these states."""
    with contextlib.closing(Slab.create(slots, 0, 4096, "0")) as slab:
        for iteration, state in enumerate(held):
            put(slab.slots[iteration], state, iteration)
        yield RankSlots(slab)


def put(slot: Slot, state: SlotState, iteration: int) -> None:
    slot.set_header(SlotHeader(state, iteration, save_name("000001-aaaa", iteration), 0, 0))


STEPS = st.lists(
    st.sampled_from(["stage", "abandon", "persisted", "failed", "reconnect"]), max_size=30
)


@settings(max_examples=60, deadline=None)
@given(slots=st.integers(2, 4), steps=STEPS)
def test_a_slot_being_read_is_never_reused_and_the_newest_is_reused_last(
    slots: int, steps: list[str]
) -> None:
    reading: list[int] = []
    iteration = 0
    with table(slots) as book:
        for step in steps:
            if step in ("stage", "abandon"):
                offers = book.offers()
                index = book.acquire()
                if index < 0:
                    assert len(reading) == slots
                    continue
                assert index not in reading
                free = set(range(slots)) - set(reading)
                if offers and index == offers[0].slot:
                    assert free == {index}, "the newest slot was reused although another was free"
                iteration += 1
                is_whole = step == "stage"
                state = SlotState.STAGED if is_whole else SlotState.STAGING
                put(book.slab.slots[index], state, iteration)
                if is_whole:
                    book.infos[index].persisting = True
                    reading.append(index)
            elif step == "reconnect":
                book.discard_torn()
            elif reading:
                index = reading.pop(0)
                book.infos[index].persisting = False
                state = SlotState.DURABLE if step == "persisted" else SlotState.FAILED
                book.mark(book.slab.slots[index].header.save_id, state)
            assert book.is_persisting == bool(reading)
            offered = [offer.iteration for offer in book.offers()]
            assert offered == sorted(offered, reverse=True)
            assert set(offered) == {slot.header.iteration for slot in complete(book)}


def complete(book: RankSlots) -> list[Slot]:
    return [slot for slot in book.slab.slots if slot.header.state in COMPLETE]


@settings(max_examples=100, deadline=None)
@given(slots=st.integers(2, 3), data=st.data())
def test_ranks_with_unequal_storage_share_the_newest_complete_checkpoint(
    slots: int, data: st.DataObject
) -> None:
    """Two ranks take slots for the same saves, and their writes end at any time."""
    with table(slots) as one, table(slots) as other:
        books = (one, other)
        for iteration in range(1, 12):
            durable = data.draw(st.booleans())
            taken = []
            for book in books:
                while (index := book.acquire()) < 0:
                    book.infos[data.draw(st.sampled_from(reading(book)))].persisting = False
                taken.append(index)
            held = [{slot.header.iteration for slot in complete(book)} for book in books]
            assert iteration == 1 or iteration - 1 in held[0] & held[1]
            for book, index in zip(books, taken, strict=True):
                state = SlotState.STAGED if durable else SlotState.KEPT
                put(book.slab.slots[index], state, iteration)
                book.infos[index].persisting = durable
                for still in reading(book):
                    book.infos[still].persisting = data.draw(st.booleans())


def reading(book: RankSlots) -> list[int]:
    return [index for index, info in enumerate(book.infos) if info.persisting]


@settings(max_examples=60, deadline=None)
@given(state=st.sampled_from(SlotState), info=st.tuples(*[st.booleans()] * 3))
def test_the_only_slot_is_free_if_unwritten_and_without_a_pending_save(
    state: SlotState, info: tuple[bool, bool, bool]
) -> None:
    persisting, digesting, accepted = info
    with table(1, state) as book:
        own = book.infos[0]
        own.persisting, own.awaits_digests = persisting, digesting
        own.accepted_at = 1.0 if accepted else None
        is_pending = state == SlotState.STAGED and accepted
        expected = -1 if persisting or is_pending else 0
        assert book.acquire() == expected
        if expected < 0:
            assert book.slab.slots[0].header.state == state
            assert bool(book.offers()) is (state in COMPLETE)


@pytest.mark.parametrize("state", COMPLETE)
def test_a_slot_being_digested_is_reused_unless_it_is_the_newest(state: SlotState) -> None:
    with table(2) as book:
        for iteration in range(1, 6):
            index = book.acquire()
            assert index == (iteration - 1) % 2, "the older slot, without a wait"
            assert not book.infos[index].awaits_digests
            put(book.slab.slots[index], state, iteration)
            book.infos[index].awaits_digests = True
            assert book.awaits_digests
            assert not book.is_persisting, "an agent that leaves does not wait for the digest"
        book.infos[book.offers()[1].slot].persisting = True
        assert book.acquire() == -1


@pytest.mark.parametrize("newest_too", [False, True])
def test_a_failed_copy_is_overwritten_before_any_complete_checkpoint(*, newest_too: bool) -> None:
    """The failed copy is the newest slot, so the order of age alone would take the oldest."""
    with table(3, SlotState.DURABLE, SlotState.DURABLE, SlotState.STAGING) as book:
        assert book.acquire(newest_too=newest_too) == 2
        assert [offer.iteration for offer in book.offers()] == [1, 0]


@pytest.mark.parametrize("state", [SlotState.STAGED, SlotState.KEPT, SlotState.FAILED])
def test_a_slab_of_a_killed_agent_holds_saves_that_it_may_have_made_durable(
    state: SlotState,
) -> None:
    """Also one that failed: the agent may have committed its next attempt, before it was killed."""
    with table(1, state) as book:
        assert book.infos[0].inherited


@pytest.mark.parametrize(
    ("held", "written"),
    [
        ((SlotState.DURABLE, SlotState.KEPT), [1]),
        ((SlotState.DURABLE, SlotState.FAILED), [1]),
        ((SlotState.KEPT, SlotState.DURABLE), []),
        ((SlotState.FAILED, SlotState.DURABLE), []),
    ],
)
def test_what_only_memory_holds_is_written_unless_storage_has_a_newer_checkpoint(
    held: tuple[SlotState, ...], written: list[int]
) -> None:
    with table(2, *held) as book:
        assert [header.iteration for header in only_in_memory([book])] == written
        if written:
            book.mark(book.slab.slots[1].header.save_id, SlotState.FAILED, is_final=True)
            assert only_in_memory([book]) == [], "no attempt can succeed"


def test_a_slab_is_free_after_its_last_former_process_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots that the process left without handing them over are dropped; accepted ones stay."""
    older, newer = RankProcess(1, 11), RankProcess(2, 22)
    alive = {older, newer}
    monkeypatch.setattr(RankProcess, "is_alive", property(lambda process: process in alive))
    kept = [SlotState.STAGED, SlotState.DURABLE]
    states = [SlotState.STAGING, SlotState.STAGED, SlotState.KEPT, *kept]
    with table(len(states), *states) as slots:
        slots.note_former(older)
        slots.note_former(newer)
        slots.infos[3].accepted_at = 0.0
        alive.remove(newer)
        assert slots.formers() == (older,)
        assert [slot.header.state for slot in slots.slab.slots] == states
        alive.remove(older)
        assert slots.formers() == ()
        assert [slot.header.state for slot in slots.slab.slots] == [SlotState.EMPTY] * 3 + kept


@settings(max_examples=60, deadline=None)
@given(
    states=st.lists(st.sampled_from(SlotState), min_size=1, max_size=4),
    left_at=st.integers(0, 3),
    data=st.data(),
)
def test_a_new_run_empties_slots_of_other_histories_unless_they_are_being_written(
    states: list[SlotState], left_at: int, data: st.DataObject
) -> None:
    history = History("000002-bbbb", (Ancestor("000001-aaaa", left_at),))
    with table(len(states), *states) as book:
        for info in book.infos:
            info.persisting = data.draw(st.booleans())
        lost = book.keep_only(history)
        unwritten = (SlotState.STAGED, SlotState.KEPT, SlotState.FAILED)
        dropped = [
            number
            for number, info in enumerate(book.infos)
            if number > left_at and not info.persisting
        ]
        assert [slot.header.state for slot in book.slab.slots] == [
            SlotState.EMPTY if number in dropped else state for number, state in enumerate(states)
        ]
        assert [save.iteration for save in lost] == [
            number for number in dropped if states[number] in unwritten
        ]


# ---------------------------------------------------------------------- with real agents


def test_acquire_reports_busy_until_a_slot_is_persisted(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    first, second = new_save_id(), new_save_id()
    with (
        blocked_shard(root, 1, 0, first) as let_go_first,
        blocked_shard(root, 1, 0, second) as let_go_second,
    ):
        trainer.stage(1, first)
        trainer.stage(1, second)
        assert trainer.client.acquire(0.0) == -1
        started = time.monotonic()
        assert trainer.client.acquire(0.3) == -1
        assert time.monotonic() - started >= 0.3
        let_go_first()
        assert trainer.client.acquire(20.0) == 0
        let_go_second()
        assert trainer.outcome().error is None


def test_the_number_of_uncommitted_saves_is_limited(
    node: Node, other_node: Node, root: Path
) -> None:
    """Persisted slots are free, so only a limit bounds the number of uncommitted saves."""
    here, there = node.trainer(root, 0, 2), other_node.trainer(root, 1, 2)
    save_ids = [new_save_id() for _ in range(8)]
    for iteration, save_id in enumerate(save_ids, 1):
        here.stage(iteration, save_id)
    assert here.begin(9, new_save_id(), 0.2) is None
    there.stage(1, save_ids[0])
    assert here.outcome().save_id == save_ids[0]
    assert here.begin(9, new_save_id(), PATIENCE_S) is not None


def memfds(pid: int) -> list[str]:
    return [path for path in open_files(pid) if "memfd:flashckpt-" in path]


def test_an_agent_closes_a_slab_only_without_a_checkpoint(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    trainer.begin(1, new_save_id())
    agent = trainer.client.agent_pid
    assert len(memfds(agent)) == 1
    for _ in range(2):  # the second call has no effect
        trainer.client.detach()
    assert memfds(agent) == []
    assert "memfd:flashckpt-" not in Path(f"/proc/{agent}/maps").read_text()
    with pytest.raises(AgentError, match="a slot was requested before a slab was attached"):
        trainer.client.acquire(0.0)
    trainer.slab.close()
    trainer.slab = None
    assert trainer.save(2).error is None
    with pytest.raises(AgentError, match="of rank 0 holds iteration 2, so the agent keeps it"):
        trainer.client.detach()
    assert [offer.iteration for offer in trainer.take()] == [2]
