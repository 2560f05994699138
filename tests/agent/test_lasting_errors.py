"""Errors that only a person can end: every node knows them, even if another node met them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from megatron_flashckpt.agent.failed_save import lasts_elsewhere
from megatron_flashckpt.file_format import file_names
from tests.agent.conftest import Node
from tests.faulty_storage.preload import FaultyStorage, fail
from tests.support.trainer import new_save_id


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_counts_as_lasting_on_all_nodes(
    node: Node, other_node: Node, root: Path, tmp_path: Path, full: int
) -> None:
    """The node of rank 0 learns from the note of the other node, and the other way round."""
    storage = FaultyStorage(root, tmp_path)
    with storage.under_agents():
        trainers = [node.trainer(root, 0, 2), other_node.trainer(root, 1, 2)]
    save_id = new_save_id()
    storage.rule(fail("write", errno.ENOSPC, file_names.shard_name(full, save_id)))
    for trainer in trainers:
        trainer.stage(1, save_id)
    outcomes = [trainer.outcome() for trainer in trainers]
    assert all("[Errno 28]" in (outcome.error or "") for outcome in outcomes)
    assert [outcome.lasts for outcome in outcomes] == [True, True]


@pytest.mark.parametrize(
    ("reason", "lasts"),
    [
        ("[Errno 28] /save: cannot write (No space left on device)", True),
        ("[Errno 110] /save: cannot write (Connection timed out)", False),
        ("rank 1: [Errno 28] no memory for a slab", False),
        ("gave up after 60 s", False),
        ("[Errno x] ", False),
    ],
)
def test_only_errors_of_storage_last(reason: str, lasts: bool) -> None:
    assert lasts_elsewhere(reason) is lasts
