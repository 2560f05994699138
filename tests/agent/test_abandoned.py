"""A save that training has abandoned while the agent of another node commits it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flashckpt.agent.commit import outcome_of
from megatron_flashckpt.agent.failed_save import forget
from megatron_flashckpt.failpoints import VARIABLE
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.base import Durable
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact, save_all
from tests.support.persisting import persisted
from tests.support.trainer import blocked_open, eventually, new_save_id

SAVE = "a" * 12


def test_a_node_removes_no_files_of_a_save_that_rank_0_is_committing(
    node: Node, other_node: Node, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks report to their agents one after the other which checkpoint training resumes from."""
    reached, save_id = tmp_path / "reached", new_save_id()
    monkeypatch.setenv(VARIABLE, f"agent:commit.common:1:STOP:{reached}")
    first = node.trainer(root, 0, 2, config=node.config(answer_timeout_s=600.0))
    monkeypatch.delenv(VARIABLE)
    second = other_node.trainer(root, 1, 2)
    second.stage(1, save_id)
    asking = threading.Thread(target=first.stage, args=(1, save_id))  # the agent may answer later
    asking.start()
    eventually("the stop before the manifest", reached.exists)
    (agent,) = node.agents()
    directory = root / file_names.iteration_dir(1)
    shard = directory / file_names.shard_name(1, save_id)
    note = directory / file_names.failure_name(1, save_id)
    try:
        second.hang_up()
        other_node.trainer(root, 1, 2).client.resume_from(None, 0)
        eventually(
            "the agent knows of the abandoned save", lambda: note.exists() or not shard.exists()
        )
    finally:
        os.kill(agent, signal.SIGCONT)
        asking.join()
    eventually("the commit", lambda: (root / file_names.TRACKER).exists())
    assert first.outcome().error is None
    assert_intact(root, 1, [first, second])


def test_a_shard_is_removed_at_once_if_rank_0_staged_no_part(node: Node, root: Path) -> None:
    """Rank 0 was killed before it staged its part, so no other node can commit the save."""
    first = node.trainer(root, 0, 2)
    second = node.trainer(root, 1, 2)
    second.client.hold(first.claim())
    save_id = new_save_id()
    second.stage(1, save_id)
    shard = root / file_names.iteration_dir(1) / file_names.shard_name(1, save_id)
    eventually("the shard", shard.exists)
    for trainer in (first, second):
        trainer.hang_up()
    again = [node.trainer(root, rank, 2) for rank in range(2)]
    again[1].client.hold(again[0].claim())
    for trainer in again:
        trainer.client.resume_from(None, 0)
    eventually("the removal of the shard", lambda: not shard.exists())
    log = node.log(root).read_text()
    assert "orphaned" not in log, "the agent removes its own shard, not an orphaned file"


def test_other_nodes_learn_that_rank_0_staged_no_part(
    node: Node, other_node: Node, root: Path
) -> None:
    first, second = (node.trainer(root, rank, 3) for rank in range(2))
    third = other_node.trainer(root, 2, 3)
    key = first.claim()
    save_id = new_save_id()
    for trainer in (second, third):
        trainer.client.hold(key)
        trainer.stage(1, save_id)
    directory = root / file_names.iteration_dir(1)
    record = directory / file_names.record_name(2, save_id)
    eventually("the record of the other node", record.exists)
    for trainer in (first, second, third):
        trainer.hang_up()
    again = [node.trainer(root, rank, 3) for rank in range(2)]
    again.append(other_node.trainer(root, 2, 3))
    key = again[0].claim()
    for trainer in again:
        trainer.client.hold(key)
        trainer.client.resume_from(None, 0)
    shard = directory / file_names.shard_name(2, save_id)
    eventually(
        "the removal of shard and record", lambda: not shard.exists() and not record.exists()
    )


@pytest.mark.parametrize("slow", [0, 1])
def test_a_save_is_abandoned_if_rank_0_moves_to_another_node(
    node: Node, other_node: Node, root: Path, slow: int
) -> None:
    """A restart has exchanged the two ranks while one shard was still being written."""
    trainers = [node.trainer(root, 0, 2), other_node.trainer(root, 1, 2)]
    trainers[1].client.hold(trainers[0].claim())
    assert save_all(trainers, 5) == [None, None]
    save_id = new_save_id()
    directory = root / file_names.iteration_dir(6)
    with blocked_open(directory / file_names.shard_name(slow, save_id)):
        for trainer in trainers:
            trainer.stage(6, save_id)
        record = directory / file_names.record_name(1 - slow, save_id)
        eventually("the record of the other rank", record.exists)
        for trainer in trainers:
            trainer.hang_up()
        later = [other_node.trainer(root, 0, 2), node.trainer(root, 1, 2)]
        later[1].client.hold(later[0].claim("take_over"))
        for trainer in later:
            trainer.client.resume_from(None, 5)
        eventually("the removal of the record", lambda: not record.exists())
    eventually("the removal of both shards", lambda: not list(directory.glob("*.safetensors")))
    eventually("both slots are read", lambda: save_all(later, 7) == [None, None])
    assert save_all(later, 8) == [None, None]
    eventually("the removal of the notes", lambda: not directory.exists())
    assert_intact(root, 8, later)
    for place in (node, other_node):
        log = place.log(root).read_text()
        assert "iteration 6 was not saved: a crash interrupted it; training resumed from" in log
        assert "ERROR" not in log


def test_queued_shards_of_an_abandoned_save_are_not_written(node: Node, root: Path) -> None:
    """Before, they were written in full and removed; the next saves waited for their slots."""
    config = node.config(persist_threads=1)
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    save_id = new_save_id()
    shard = root / file_names.iteration_dir(1) / file_names.shard_name(0, save_id)
    log = node.log(root)
    with blocked_open(shard) as unblock:
        for trainer in trainers:
            trainer.stage(1, save_id)
            trainer.hang_up()
        later = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
        for trainer in later:
            trainer.client.resume_from(None, 0)
        eventually("the end of the save", lambda: "iteration 1 was not saved" in log.read_text())
        unblock()
        assert save_all(later, 2) == [None, None]
    assert "rank 1: persisted iteration 2" in log.read_text()
    assert "rank 1: persisted iteration 1" not in log.read_text()
    assert_intact(root, 2, later)


class _CallingStorage(PosixStorage):
    """Real storage that calls `tell` before it puts the common state."""

    tell: Callable[[], None]

    def put(
        self,
        name: str,
        data: bytes,
        durable: Durable = "name",
        guard: Callable[[], None] | None = None,
    ) -> None:
        if file_names.common_name(SAVE) in name:
            self.tell()
        super().put(name, data, durable, guard)


def test_an_abandoned_commit_stops_before_its_manifest(root: Path) -> None:
    storage = _CallingStorage(root)
    save = persisted(storage, SAVE)
    storage.tell = lambda: setattr(save, "is_abandoned", True)
    finished, error = outcome_of(save, 60.0)
    assert (finished, "resumed from an older" in (error or "")) == (True, True)
    forget(save)
    assert not list(root.glob(f"{file_names.iteration_dir(5)}/[mcr]*[!d]"))


def test_other_nodes_remove_their_part_after_rank_0_reports_the_end(root: Path) -> None:
    saves = [persisted(PosixStorage(root), SAVE, rank, 2) for rank in range(2)]
    for save in saves:
        save.is_abandoned = True
    assert outcome_of(saves[1], 60.0)[0] is False
    forget(saves[1])
    shards = [
        root / file_names.iteration_dir(5) / file_names.shard_name(rank, SAVE) for rank in range(2)
    ]
    assert [shard.exists() for shard in shards] == [True, True]
    for save in saves:
        assert outcome_of(save, 60.0)[0]
        forget(save)
    assert [shard.exists() for shard in shards] == [False, False]


def test_a_shard_without_a_commit_record_is_removed_at_once(root: Path) -> None:
    """No agent can commit a shard that lacks a record."""
    save = persisted(PosixStorage(root), SAVE, 1, 2)
    save.is_abandoned = True
    (root / file_names.iteration_dir(5) / file_names.record_name(1, SAVE)).unlink()
    assert outcome_of(save, 60.0)[0]
    forget(save)
    assert not (root / file_names.iteration_dir(5) / file_names.shard_name(1, SAVE)).exists()


def test_a_node_waits_for_rank_0_only_for_a_limited_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_flashckpt.agent.commit._ABANDONED_S", 0.0)
    save = persisted(PosixStorage(root), SAVE, 1, 2)
    save.is_abandoned = True
    assert outcome_of(save, 60.0)[0]
    forget(save)
    assert (root / file_names.iteration_dir(5) / file_names.shard_name(1, SAVE)).exists(), (
        "the sweep of orphaned files removes this shard"
    )
