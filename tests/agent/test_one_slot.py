"""`slots: 1`: storage holds the previous checkpoint while the only slot is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.file_format import file_names
from tests.agent.conftest import Node
from tests.support.cluster import cluster
from tests.support.trainer import (
    blocked_open,
    content,
    eventually,
    new_save_id,
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
