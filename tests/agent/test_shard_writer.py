"""Staged slots, which become committed checkpoints with exactly their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, open_checkpoint
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES, chunk_digest
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.load.chunk_reader import read_all
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.support.trainer import FakeTrainer, eventually, new_save_id

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


def stored(root: Path, iteration: int) -> StoredCheckpoint:
    return open_checkpoint(PosixStore(root), iteration)


def read_rank(checkpoint: StoredCheckpoint, trainer: FakeTrainer) -> bytes:
    """Return the verified bytes of a rank in layout order."""
    plan = read_plan(trainer.pieces, checkpoint.sources(), checkpoint.place)
    tensors = [torch.empty(p.numel, dtype=_TORCH[p.dtype]) for p in trainer.pieces]
    read_all(checkpoint, plan, trainer.pieces, Targets(trainer.pieces, tensors), threads=2)
    return b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_commit_writes_shards_manifest_common_state_and_tracker(
    node: Node, root: Path, world_size: int
) -> None:
    trainers = [node.trainer(root, rank, world_size) for rank in range(world_size)]
    run = trainers[0].open_run()
    for trainer in trainers[1:]:
        trainer.join(run)
    save_id = trainers[0].new_save_id()
    for trainer in trainers:
        trainer.stage(7, save_id)
    for trainer in trainers:
        outcome = trainer.outcome()
        assert (outcome.iteration, outcome.save_id, outcome.error) == (7, save_id, None)
        assert outcome.seconds > 0
        assert trainer.client.poll().pending == 0
    eventually("the removal of commit records", lambda: not list(root.rglob("*.record")))
    shards = {file_names.shard_name(rank, save_id) for rank in range(world_size)}
    assert {p.name for p in (root / "iter_0000007").iterdir()} == shards | {
        file_names.end_name(save_id),
        file_names.common_name(save_id),
    }
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert {p.name for p in root.iterdir()} == {
        "iter_0000007",
        file_names.TRACKER,
        file_names.OWN,
    }
    common = root / "iter_0000007" / file_names.common_name(save_id)
    assert common.read_bytes() == f"common of 7 by {save_id}".encode()


def test_a_slot_of_several_chunks_gets_one_digest_per_chunk(node: Node, root: Path) -> None:
    trainer = node.trainer(root, numel=2 * CHUNK_NBYTES // 6 + 5)
    assert 2 * CHUNK_NBYTES < trainer.layout.nbytes < 3 * CHUNK_NBYTES
    data = trainer.stage(1, new_save_id())
    assert trainer.outcome().error is None
    expected = tuple(
        chunk_digest(data[start : start + CHUNK_NBYTES])
        for start in range(0, len(data), CHUNK_NBYTES)
    )
    assert len(expected) == 3
    assert stored(root, 1).shard(0).digests == expected
    assert read_rank(stored(root, 1), trainer) == data
    (offer,) = trainer.take()
    assert offer.digests == expected, "the agent offers the digests for a restart from memory"
    assert offer.durable


def test_a_rank_without_pieces_takes_part(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, 0, 2), node.trainer(root, 1, 2, numel=0)]
    save_id = new_save_id()
    data = [trainer.stage(5, save_id) for trainer in trainers]
    assert [trainer.outcome().error for trainer in trainers] == [None, None]
    assert data[1] == b""
    checkpoint = stored(root, 5)
    assert checkpoint.shard(1).template.items == ()
    assert read_rank(checkpoint, trainers[0]) == data[0]
