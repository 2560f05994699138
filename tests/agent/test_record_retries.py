"""Commit records whose put reported an error: the file may exist, and other nodes may read it."""

from __future__ import annotations

import errno
from pathlib import Path

from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact
from tests.faulty_storage.preload import FaultyStorage, fail
from tests.support.trainer import new_save_id


def test_a_shard_with_a_record_is_never_rewritten(
    node: Node, other_node: Node, root: Path, tmp_path: Path
) -> None:
    """The node of rank 0 may have committed the shard by then, and the disk may be full."""
    faulty = FaultyStorage(root, tmp_path)
    first = node.trainer(root, 0, 2)
    with faulty.under_agents():
        second = other_node.trainer(root, 1, 2)
    trainers = [first, second]
    save_id = new_save_id()
    for trainer in trainers:
        trainer.stage(1, save_id)
    assert [trainer.outcome().error for trainer in trainers] == [None, None]
    faulty.rule(
        fail("rename", errno.ETIMEDOUT, "rank_00001-", times=1, done=True),
        fail("fallocate", errno.ENOSPC, ".safetensors", skip=1),
    )
    save_id = new_save_id()
    for trainer in trainers:
        trainer.stage(2, save_id)
    assert [trainer.outcome().error for trainer in trainers] == [None, None]
    assert [hit.call for hit in faulty.hits()] == ["rename"]
    assert_intact(root, 2, trainers)
