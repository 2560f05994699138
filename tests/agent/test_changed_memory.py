"""Memory that changes after its trainer has gone: neither restored nor written.

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
from megatron_flashckpt.load.slot_chunks import OfferedSlot
from megatron_flashckpt.memory.slot import SlotHeader, SlotState
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Store
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.trainer import (
    PATIENCE_S,
    FakeTrainer,
    blocked_shard,
    content,
    eventually,
    kill_agent,
    new_save_id,
)


def restored(trainer: FakeTrainer, offer: Offer) -> bytes:
    """Return the bytes that a load would take from the only chunk of a slot."""
    assert trainer.slab is not None
    held = OfferedSlot(trainer.slab, offer, trainer.rank)
    data = bytearray(held.data_nbytes(trainer.rank))
    held.read_chunk(trainer.rank, 0, [memoryview(data)])
    return bytes(data)


def flip(trainer: FakeTrainer, offer: Offer) -> None:
    assert trainer.slab is not None
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
        assert trainer.slab is not None
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

    def late(store: Store, header: SlotHeader, rank: int) -> tuple[str, ...]:
        may_read.wait(PATIENCE_S)
        return read(store, header, rank)

    monkeypatch.setattr(saves, "stored_digests", late)
    with agent_here(node, root):
        trainer.reconnect()
        trainer.hang_up()
        again = node.trainer(root)
        for _ in range(100):  # to digest the memory takes less time
            reply, fd = again.client._ask(TakeSlab(), SlabOffer)
            assert fd is not None
            os.close(fd)
            assert (reply.is_digesting, reply.offers[0].digests) == (True, None)
        may_read.set()
        assert again.take()[0].digests == offer.digests
