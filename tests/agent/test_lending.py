"""Slots of other ranks of a node, which the agent lends for a load."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.load.slot_chunks import LentSlot
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotState
from tests.agent.conftest import Node
from tests.support.processes import open_files
from tests.support.trainer import FakeTrainer, content, new_save_id

SAVE_ID = new_save_id()


@pytest.fixture
def ranks(node: Node, root: Path) -> list[FakeTrainer]:
    """Two ranks of a node, each with iteration 1 in its memory."""
    made = [node.trainer(root, rank, 2) for rank in range(2)]
    for trainer in made:
        trainer.keep(1, SAVE_ID)
        trainer.take()  # returns when the agent has digested the slots, as in a load
    return made


def lent(borrower: FakeTrainer, rank: int) -> tuple[Slab, Offer]:
    slot = borrower.client.lend(rank, SAVE_ID)
    assert slot is not None
    return slot


def read(slot: LentSlot, rank: int) -> bytes:
    data = bytearray(slot.data_nbytes(rank))
    slot.read_chunk(rank, 0, [memoryview(data)])
    return bytes(data)


def test_a_rank_reads_the_slot_of_another_rank_also_of_one_that_is_gone(
    ranks: list[FakeTrainer],
) -> None:
    before = len(open_files())
    slot = LentSlot(*lent(ranks[0], 1), 1)
    assert read(slot, 1) == content(1, 1, ranks[1].layout.nbytes)
    slot.verify(1, 0)
    assert len(open_files()) == before + 1
    del slot
    assert len(open_files()) == before
    with pytest.raises(CorruptCheckpointError, match="belongs to rank 1"):
        LentSlot(*lent(ranks[0], 1), 0)
    ranks[1].hang_up()
    assert read(LentSlot(*lent(ranks[0], 1), 1), 1) == content(1, 1, ranks[0].layout.nbytes)


def test_an_agent_lends_nothing_that_it_does_not_have_or_has_not_digested(
    ranks: list[FakeTrainer],
) -> None:
    assert ranks[0].client.lend(1, new_save_id()) is None
    assert ranks[0].client.lend(2, SAVE_ID) is None
    save_id = new_save_id()
    slot = ranks[1].begin(2, save_id)
    assert slot is not None
    slot.set_state(SlotState.STAGED)
    assert ranks[0].client.lend(1, save_id) is None


def test_a_slot_that_was_overwritten_is_refused(ranks: list[FakeTrainer]) -> None:
    slab, offer = lent(ranks[0], 1)
    slot = LentSlot(slab, offer, 1)
    for iteration in (2, 3):
        ranks[1].keep(iteration)
    with pytest.raises(CorruptCheckpointError, match=r"slot 0 of rank 1, .*host memory changed"):
        read(slot, 1)
    with pytest.raises(CorruptCheckpointError, match="but the agent offered"):
        LentSlot(slab, offer, 1)
