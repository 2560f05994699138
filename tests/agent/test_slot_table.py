"""Slots: which one a save gets, and which checkpoints in memory are offered or dropped."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt.agent.slot_table import RankSlots
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import COMPLETE, SlotHeader, SlotState
from tests.agent.conftest import Node
from tests.agent.test_resources import open_files
from tests.support.trainer import PATIENCE_S, blocked_open, new_save_id


def test_acquire_reports_busy_until_a_slot_is_persisted(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    first, second = new_save_id(), new_save_id()
    directory = root / file_names.iteration_dir(1)
    with (
        blocked_open(directory / file_names.shard_name(0, first)) as let_go_first,
        blocked_open(directory / file_names.shard_name(0, second)) as let_go_second,
    ):
        trainer.stage(1, first)
        trainer.stage(1, second)
        assert trainer.client.acquire(2, new_save_id(), 0.0) == -1
        started = time.monotonic()
        assert trainer.client.acquire(2, new_save_id(), 0.3) == -1
        assert time.monotonic() - started >= 0.3
        let_go_first()
        assert trainer.client.acquire(2, new_save_id(), 20.0) == 0
        let_go_second()
        assert trainer.outcome().error is None


STEPS = st.lists(
    st.sampled_from(["stage", "abandon", "persisted", "failed", "reconnect"]), max_size=30
)


@settings(max_examples=60, deadline=None)
@given(slots=st.integers(2, 4), steps=STEPS)
def test_a_slot_being_read_is_never_reused_and_the_newest_is_reused_last(
    slots: int, steps: list[str]
) -> None:
    slab = Slab.create(slots, 0, 4096, "0")
    book = RankSlots(slab)
    reading: list[int] = []
    iteration = 0
    try:
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
                state = SlotState.STAGED if step == "stage" else SlotState.STAGING
                slab.slots[index].set_header(SlotHeader(state, iteration, f"{iteration:x}", 0, 0))
                if step == "stage":
                    book.infos[index].persisting = True
                    reading.append(index)
            elif step == "reconnect":
                book.discard_torn()
            elif reading:
                index = reading.pop(0)
                book.infos[index].persisting = False
                state = SlotState.DURABLE if step == "persisted" else SlotState.FAILED
                book.mark(slab.slots[index].header.save_id, state)
            assert book.is_persisting == bool(reading)
            offered = [offer.iteration for offer in book.offers()]
            assert offered == sorted(offered, reverse=True)
            complete = [s.header.iteration for s in slab.slots if s.header.state in COMPLETE]
            assert sorted(offered) == sorted(complete)
    finally:
        slab.close()


@pytest.mark.parametrize("state", COMPLETE)
def test_a_slot_being_digested_is_reused_unless_it_is_the_newest(state: SlotState) -> None:
    slab = Slab.create(2, 0, 4096, "0")
    try:
        book = RankSlots(slab)
        for iteration in range(1, 6):
            index = book.acquire()
            assert index == (iteration - 1) % 2, "the older slot, without a wait"
            assert not book.infos[index].awaits_digests
            slab.slots[index].set_header(SlotHeader(state, iteration, f"{iteration:x}", 0, 0))
            book.infos[index].awaits_digests = True
            assert book.awaits_digests
            assert not book.is_persisting, "an agent that leaves does not wait for the digest"
        book.infos[book.offers()[1].slot].persisting = True
        assert book.acquire() == -1
    finally:
        slab.close()


@pytest.mark.parametrize("newest_too", [False, True])
def test_a_failed_copy_is_overwritten_before_any_complete_checkpoint(*, newest_too: bool) -> None:
    """The failed copy is the newest slot, so the order of age alone would take the oldest."""
    slab = Slab.create(3, 0, 4096, "0")
    try:
        book = RankSlots(slab)
        states = (SlotState.DURABLE, SlotState.DURABLE, SlotState.STAGING)
        for iteration, state in enumerate(states):
            index = book.acquire()
            slab.slots[index].set_header(SlotHeader(state, iteration, f"{iteration:x}", 0, 0))
        assert book.acquire(newest_too=newest_too) == index
        assert [offer.iteration for offer in book.offers()] == [1, 0]
    finally:
        slab.close()


@pytest.mark.parametrize("newest", [0, 1])
def test_a_slab_of_a_killed_agent_keeps_its_newest_checkpoint_longest(newest: int) -> None:
    slab = Slab.create(2, 100, 100, "0")
    try:
        for slot in slab.slots:
            iteration = 20 if slot.index == newest else 10
            slot.set_header(SlotHeader(SlotState.STAGED, iteration, f"{iteration:x}", 0, 0))
        slots = RankSlots(slab)
        assert [offer.iteration for offer in slots.offers()] == [20, 10]
        assert slots.acquire() == 1 - newest
    finally:
        slab.close()


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


@pytest.mark.parametrize("state", [SlotState.STAGED, SlotState.KEPT, SlotState.FAILED])
def test_a_slab_of_a_killed_agent_holds_saves_that_it_may_have_made_durable(
    state: SlotState,
) -> None:
    """Also one that failed: the agent may have committed its next attempt, before it was killed."""
    slab = Slab.create(1, 0, 4096, "0")
    try:
        slab.slots[0].set_header(SlotHeader(state, 1, new_save_id(), 0, 0))
        assert RankSlots(slab).infos[0].inherited
    finally:
        slab.close()


def memfds(pid: int) -> list[str]:
    return [path for path in open_files(pid) if "memfd:flashckpt-" in path]


def test_an_agent_closes_a_slab_without_a_checkpoint(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    trainer.begin(1, new_save_id())
    agent = trainer.client.agent_pid
    assert len(memfds(agent)) == 1
    trainer.client.detach()
    assert memfds(agent) == []
    assert "memfd:flashckpt-" not in Path(f"/proc/{agent}/maps").read_text()
    trainer.client.detach()  # a second call has no effect
    with pytest.raises(AgentError, match="a slot was requested before a slab was attached"):
        trainer.client.acquire(1, new_save_id(), 0.0)
    assert trainer.slab is not None
    trainer.slab.close()
    trainer.slab = None
    assert trainer.save(2).error is None


def test_an_agent_keeps_a_slab_with_a_checkpoint(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    assert trainer.save(1).error is None
    with pytest.raises(AgentError, match="of rank 0 holds iteration 1, so the agent keeps it"):
        trainer.client.detach()
    assert [offer.iteration for offer in trainer.take()] == [1]
