"""Errors that only a person can end: every node knows them, even if another node met them."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact, save_all
from tests.faulty_storage.preload import FaultyStorage, fail
from tests.support.agents import agent_here
from tests.support.trainer import new_save_id


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_counts_as_lasting_on_all_nodes(
    node: Node, other_node: Node, root: Path, tmp_path: Path, full: int
) -> None:
    """The other node learns it from the end of the save."""
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


class _Away(PosixStore):
    """A store that cannot be reached."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise StorageError(errno.EHOSTDOWN, os.strerror(errno.EHOSTDOWN))

    get = put = create = writer = list = present = delete = stat = _refuse


@pytest.mark.parametrize("away", [0, 1])
@pytest.mark.usefixtures("impatient")
def test_a_node_without_storage_does_not_keep_the_others_waiting(
    node: Node, other_node: Node, root: Path, away: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot report the failure; each node ends the save at its own deadline."""
    save_id = new_save_id()
    with contextlib.ExitStack() as agents:
        trainers = []
        for rank, place in enumerate((node, other_node)):
            agent = agents.enter_context(agent_here(place, root, commit_timeout_s=3.0))
            if rank == away:
                monkeypatch.setattr(agent._node, "store_at", lambda _: _Away(root))
            trainers.append(place.trainer(root, rank, 2))
        for trainer in trainers:
            trainer.stage(1, save_id)
        errors = [trainer.outcome().error or "" for trainer in trainers]
        assert "Host is down" in errors[away]
        assert "gave up after 3 s" in errors[1 - away]
        monkeypatch.undo()
        assert save_all(trainers, 2) == [None, None]
        assert_intact(root, 2, trainers)
