"""Slots that the agent offers or lends for a load: changed memory is neither restored nor written.

When a trainer disconnects, the agent digests the slots that are not fully persisted, and offers
them with these digests.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.agent import saves
from megatron_flashckpt.agent.protocol import Offer, SlabOffer, TakeSlab
from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.load.slot_chunks import LentSlot, OfferedSlot
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotState
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Store
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.processes import open_files
from tests.support.trainer import (
    PATIENCE_S,
    FakeTrainer,
    blocked_shard,
    content,
    eventually,
    kill_agent,
    new_save_id,
)


def read(slot: OfferedSlot | LentSlot, rank: int) -> bytes:
    """Return the bytes that a load would take from the only chunk of a slot."""
    data = bytearray(slot.data_nbytes(rank))
    slot.read_chunk(rank, 0, [memoryview(data)])
    return bytes(data)


def restored(trainer: FakeTrainer, offer: Offer) -> bytes:
    return read(OfferedSlot(trainer.slab, offer, trainer.rank), trainer.rank)


def flip(trainer: FakeTrainer, offer: Offer) -> None:
    with trainer.slab.slots[offer.slot].data() as data:
        data[len(data) // 2] ^= 4


def test_a_slot_that_changed_while_its_persist_hung_is_neither_restored_nor_written(
    node: Node, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without digests it is restored, with a warning."""
    save_id = new_save_id()
    with blocked_shard(root, 7, 0, save_id) as unblock:
        crashed = node.process(root, iterations=[7], save_id=save_id, stop="staged")
        crashed.stopped()
        crashed.kill()
        trainer = node.trainer(root)
        (offer,) = trainer.take()
        assert offer.digests is not None, "the agent digested the slot at the hang-up"
        data = content(0, 7, trainer.layout.nbytes)
        with caplog.at_level(logging.WARNING):
            assert restored(trainer, offer) == data
            assert caplog.messages == []
            assert restored(trainer, msgspec.structs.replace(offer, digests=None)) == data
        (warning,) = caplog.messages
        assert "iter_0000007: is restored unverified" in warning
        assert "set 'restore_from_memory: false' to load from storage" in warning
        flip(trainer, offer)
        with pytest.raises(CorruptCheckpointError, match="host memory changed after it was staged"):
            restored(trainer, offer)
        unblock()
        slot = trainer.slab.slots[offer.slot]
        eventually("the slot is marked failed", lambda: slot.header.state == SlotState.FAILED)
    assert "its slot changed after it was digested" in node.log(root).read_text()
    assert not (root / file_names.TRACKER).exists()
    assert list(read_facts(PosixStore(root)).stored) == []


def test_a_load_waits_for_digests_that_are_being_read_from_storage(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, slow storage made the agent digest the memory, which had changed."""
    trainer = node.trainer(root)
    assert trainer.save(7).error is None
    (offer,) = trainer.take()
    kill_agent(trainer.client.agent_pid)
    flip(trainer, offer)
    may_read, read = threading.Event(), saves.stored_digests

    def late(store: Store, iteration: int, save_id: str, rank: int) -> tuple[str, ...]:
        may_read.wait(PATIENCE_S)
        return read(store, iteration, save_id, rank)

    monkeypatch.setattr(saves, "stored_digests", late)
    with agent_here(node, root):
        trainer.reconnect()
        trainer.hang_up()
        again = node.trainer(root)
        for _ in range(100):  # to digest the memory takes less time
            reply, fd = again.client._ask(TakeSlab(), SlabOffer)
            os.close(fd)
            assert (reply.is_digesting, reply.offers[0].digests) == (True, None)
        may_read.set()
        assert again.take()[0].digests == offer.digests


# ---------------------------------------------------------------------- lent to other ranks

SAVE_ID = new_save_id()


@pytest.fixture
def lenders(node: Node, root: Path) -> list[FakeTrainer]:
    """Two ranks of a node, each with iteration 1 in its memory."""
    made = [node.trainer(root, rank, 2) for rank in range(2)]
    for trainer in made:
        trainer.keep(1, SAVE_ID)
        trainer.take()  # returns when the agent has digested the slots, as in a load
    return made


def lent(borrower: FakeTrainer, rank: int) -> tuple[Slab, Offer]:
    return borrower.client.lend(rank, SAVE_ID)


def test_a_rank_reads_the_slot_of_another_rank_also_of_one_that_is_gone(
    lenders: list[FakeTrainer],
) -> None:
    before = len(open_files())
    slot = LentSlot(*lent(lenders[0], 1), 1)
    assert read(slot, 1) == content(1, 1, lenders[1].layout.nbytes)
    slot.verify(1, 0)
    assert len(open_files()) == before + 1
    del slot
    assert len(open_files()) == before
    with pytest.raises(CorruptCheckpointError, match="belongs to rank 1"):
        LentSlot(*lent(lenders[0], 1), 0)
    lenders[1].hang_up()
    assert read(LentSlot(*lent(lenders[0], 1), 1), 1) == content(1, 1, lenders[0].layout.nbytes)


def test_an_agent_lends_nothing_that_it_does_not_have_or_has_not_digested(
    lenders: list[FakeTrainer],
) -> None:
    assert lenders[0].client.lend(1, new_save_id()) is None
    assert lenders[0].client.lend(2, SAVE_ID) is None
    save_id = new_save_id()
    slot = lenders[1].begin(2, save_id)
    slot.set_state(SlotState.STAGED)
    assert lenders[0].client.lend(1, save_id) is None


def test_a_slot_that_was_overwritten_is_refused(lenders: list[FakeTrainer]) -> None:
    slab, offer = lent(lenders[0], 1)
    slot = LentSlot(slab, offer, 1)
    for iteration in (2, 3):
        lenders[1].keep(iteration)
    with pytest.raises(CorruptCheckpointError, match=r"slot 0 of rank 1, .*host memory changed"):
        read(slot, 1)
    with pytest.raises(CorruptCheckpointError, match="but the agent offered"):
        LentSlot(slab, offer, 1)
