"""`slots: 1`: storage holds the previous checkpoint while the only slot is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt.agent.slot_table import RankSlots
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import COMPLETE, SlotHeader, SlotState
from tests.agent.conftest import Node
from tests.support.cluster import cluster
from tests.support.trainer import (
    blocked_open,
    content,
    eventually,
    new_save_id,
    run_after,
)


def committed(root: Path) -> int:
    return int((root / file_names.TRACKER).read_text())


def test_a_save_waits_for_the_commit_of_the_previous_one(node: Node, root: Path) -> None:
    """The shard of this rank is not enough, because the shard of the other rank may fail."""
    first, second = (node.trainer(root, rank, 2, slots=1) for rank in range(2))
    save_id = new_save_id()
    directory = root / file_names.iteration_dir(1)
    with blocked_open(directory / file_names.shard_name(1, save_id)) as unblock:
        for trainer in (first, second):
            trainer.stage(1, save_id)
        record = directory / file_names.record_name(range(1), save_id)
        eventually("the commit record", record.exists)
        assert first.client.acquire(2, new_save_id(), 0.2) == -1
        unblock()
        assert first.client.acquire(2, new_save_id(), 60.0) == 0
    assert committed(root) == 1


def test_a_crash_during_a_copy_leaves_the_previous_checkpoint_in_storage(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root, slots=1)
    save_id = new_save_id()
    assert trainer.save(1, save_id).error is None
    slot = trainer.begin(2, new_save_id(), 60.0)
    assert slot is not None
    trainer.hang_up()
    again = node.trainer(root, slots=1)
    assert again.take() == (), "a partial checkpoint is not offered"
    assert committed(root) == 1
    again.join(run_after(save_id, 1))
    assert again.save(2).error is None
    assert committed(root) == 2


@pytest.mark.parametrize("scheme", ["copy", "xor"])
def test_a_lost_node_gets_its_only_checkpoint_from_others(tmp_path: Path, scheme: str) -> None:
    with cluster(tmp_path, (1, 1, 1), slots=1) as job:
        job.start(scheme, 3)
        for iteration in (1, 2):
            for trainer in job.trainers.values():
                if iteration == 2:
                    trainer.outcome()
            save_id = job.stage(iteration)
            job.await_held(iteration, 1 if scheme == "copy" else 2)
        job.lose(0)
        job.start(scheme, 3)
        back = job.trainers[0]
        back.client.recover((save_id,))
        (offer,) = back.take()
        assert offer.iteration == 2
        assert back.bytes_in(offer.slot) == content(0, 2, back.layout.nbytes)


@settings(max_examples=60, deadline=None)
@given(
    state=st.sampled_from(SlotState),
    persisting=st.booleans(),
    digesting=st.booleans(),
    accepted=st.booleans(),
)
def test_the_only_slot_is_free_if_unwritten_and_without_a_pending_save(
    state: SlotState, persisting: bool, digesting: bool, accepted: bool
) -> None:
    slab = Slab.create(1, 0, 4096, "0")
    try:
        slab.slots[0].set_header(SlotHeader(state, 1, "1", 0, 0))
        book = RankSlots(slab)
        info = book.infos[0]
        info.persisting, info.awaits_digests = persisting, digesting
        info.accepted_at = 1.0 if accepted else None
        is_pending = state == SlotState.STAGED and accepted
        expected = -1 if persisting or is_pending else 0
        assert book.acquire() == expected
        if expected < 0:
            assert slab.slots[0].header.state == state
            assert bool(book.offers()) is (state in COMPLETE)
    finally:
        slab.close()
