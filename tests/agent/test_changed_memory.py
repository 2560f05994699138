"""Memory that changes after its trainer has gone is neither restored nor written.

As soon as a trainer hangs up, the agent digests the slots that it has not read to their end, and
offers them with these digests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.agent.rendezvous import LOG
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.held_slot import HeldSlot
from megatron_flashckpt.layout import names
from megatron_flashckpt.memory.slot import SlotState
from tests.agent.conftest import Node
from tests.agent.trainer import FakeTrainer, content, eventually, held_back, new_save_id


def restored(trainer: FakeTrainer, offer: Offer) -> bytes:
    """Return what a load would take of the only chunk of a slot."""
    assert trainer.slab is not None
    held = HeldSlot(trainer.slab, offer, trainer.rank)
    found = bytearray(held.data_nbytes(trainer.rank))
    held.read_chunk(trainer.rank, 0, [memoryview(found)])
    return bytes(found)


def flip(trainer: FakeTrainer, offer: Offer) -> None:
    assert trainer.slab is not None
    with trainer.slab.slots[offer.slot].data() as data:
        data[len(data) // 2] ^= 4


def test_a_slot_whose_persist_hangs_is_restored_and_written_only_as_its_trainer_left_it(
    node: Node, root: Path
) -> None:
    save_id = new_save_id()
    shard = root / names.iteration_dir(7) / names.shard_name(0, save_id)
    with held_back(shard) as let_go:
        crashed = node.process(root, iterations=[7], save_id=save_id, stop="staged")
        crashed.stopped()
        crashed.kill()
        trainer = node.trainer(root)
        (offer,) = trainer.take()
        assert offer.digests is not None, "nobody has read it"
        assert restored(trainer, offer) == content(0, 7, trainer.layout.nbytes)
        flip(trainer, offer)
        with pytest.raises(CorruptCheckpointError, match="host memory changed after it was staged"):
            restored(trainer, offer)
        let_go()
        assert trainer.slab is not None
        slot = trainer.slab.slots[offer.slot]
        eventually("the failure", lambda: slot.header.state == SlotState.FAILED)
    assert "its slot changed after its trainer had gone" in (node.directory(root) / LOG).read_text()
    assert not (root / names.TRACKER).exists()
    assert not (root / names.iteration_dir(7) / names.MANIFEST).exists()


def test_a_slot_that_could_not_be_written_is_digested_when_its_trainer_hangs_up(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    root.mkdir(exist_ok=True)
    (root / names.iteration_dir(7)).write_text("in the way")
    data = trainer.stage(7, new_save_id())
    assert trainer.outcome().error is not None
    trainer.hang_up()
    (root / names.iteration_dir(7)).unlink()
    again = node.trainer(root)
    (offer,) = again.take()
    assert restored(again, offer) == data
    flip(again, offer)
    with pytest.raises(CorruptCheckpointError, match="host memory changed after it was staged"):
        restored(again, offer)
