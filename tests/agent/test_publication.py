"""Publication: a node puts one commit record for all its ranks, and waits for them in bounds."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from megatron_flashckpt.agent import publication
from megatron_flashckpt.agent.commit import outcome_of
from megatron_flashckpt.agent.failed_save import forget
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.agent.publication import is_due, publish
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.failpoints import VARIABLE
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.base import Durable
from megatron_flashckpt.storage.posix import PosixStorage, PosixWriter
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact
from tests.agent.test_faulty_storage import agent_here
from tests.agent.test_shard_writer import stored
from tests.support.persisting import persisted, written
from tests.support.trainer import (
    PATIENCE_S,
    FakeTrainer,
    blocked_open,
    eventually,
    is_alive,
    new_save_id,
)

SAVE_ID = "a" * 12
DIRECTORY = file_names.iteration_dir(5)
LOCK = threading.Condition()


class RecordingStorage(PosixStorage):
    """Real storage of agents in this process, which records puts of records and refuses some."""

    records: ClassVar[list[str]] = []
    no_space_for = ""
    all_staged = threading.Event()

    def put(
        self,
        name: str,
        data: bytes,
        durable: Durable = "name",
        guard: Callable[[], None] | None = None,
    ) -> None:
        if name.endswith(".commit"):
            self.records.append(name.rpartition("/")[2])
        super().put(name, data, durable, guard)

    def create(self, name: str, nbytes: int) -> PosixWriter:
        if self.no_space_for and self.no_space_for in name:
            self.all_staged.wait(PATIENCE_S)  # otherwise a late rank would get a separate save
            raise StorageError(errno.ENOSPC, f"{self.place}/{name}: No space left")
        return super().create(name, nbytes)


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RecordingStorage]]:
    monkeypatch.setattr(RecordingStorage, "records", [])
    monkeypatch.setattr(RecordingStorage, "all_staged", threading.Event())
    monkeypatch.setattr("megatron_flashckpt.agent.state.open_storage", RecordingStorage)
    # A busy machine must not make any rank count as slow.
    monkeypatch.setattr("megatron_flashckpt.agent.pending_save._PUBLISH_S", (60.0, 60.0))
    yield RecordingStorage
    RecordingStorage.no_space_for = ""


def stage_all(trainers: list[FakeTrainer], iteration: int) -> str:
    save_id = new_save_id()
    for trainer in trainers:
        trainer.stage(iteration, save_id)
    return save_id


def test_a_node_of_four_ranks_puts_one_record_per_save(
    node: Node, root: Path, noting: type[RecordingStorage]
) -> None:
    """Before, there were four records, each of which was made, renamed, read and removed."""
    with agent_here(node, root):
        trainers = [node.trainer(root, rank, 4) for rank in range(4)]
        for iteration in (1, 2):
            save_id = stage_all(trainers, iteration)
            assert [trainer.outcome().error for trainer in trainers] == [None] * 4
            assert noting.records == [file_names.record_name(0, save_id, 4)]
            assert_intact(root, iteration, trainers)
            noting.records.clear()
        eventually("the removal of commit records", lambda: not list(root.rglob("*.commit")))


def test_each_of_two_nodes_puts_the_record_of_its_ranks(
    node: Node, other_node: Node, root: Path, noting: type[RecordingStorage]
) -> None:
    with agent_here(node, root), agent_here(other_node, root):
        trainers = [node.trainer(root, rank, 5) for rank in (0, 1)]
        trainers += [other_node.trainer(root, rank, 5) for rank in (2, 3, 4)]
        save_id = stage_all(trainers, 1)
        assert [trainer.outcome().error for trainer in trainers] == [None] * 5
        assert sorted(noting.records) == [
            file_names.record_name(0, save_id, 2),
            file_names.record_name(2, save_id, 3),
        ]
        assert_intact(root, 1, trainers)


def test_ranks_that_are_not_neighbours_have_records_of_their_own(
    node: Node, other_node: Node, root: Path, noting: type[RecordingStorage]
) -> None:
    with agent_here(node, root), agent_here(other_node, root):
        trainers = [node.trainer(root, rank, 4) for rank in (0, 2)]
        trainers += [other_node.trainer(root, rank, 4) for rank in (1, 3)]
        save_id = stage_all(trainers, 1)
        assert [trainer.outcome().error for trainer in trainers] == [None] * 4
        assert sorted(noting.records) == [
            file_names.record_name(number, save_id) for number in range(4)
        ]


def test_a_failed_save_publishes_no_record_and_leaves_no_file(
    node: Node, other_node: Node, root: Path, noting: type[RecordingStorage]
) -> None:
    noting.no_space_for = "rank_00002-"
    with agent_here(node, root), agent_here(other_node, root):
        trainers = [node.trainer(root, 0, 4)]
        trainers += [other_node.trainer(root, rank, 4) for rank in (1, 2, 3)]
        save_id = stage_all(trainers, 1)
        noting.all_staged.set()
        for trainer in trainers:
            assert "No space left" in (trainer.outcome().error or "")
        assert {*noting.records} <= {file_names.record_name(0, save_id)}
        eventually("no shard is left", lambda: not list(root.rglob("*.safetensors")))
        noting.no_space_for = ""
        stage_all(trainers, 2)
        assert [trainer.outcome().error for trainer in trainers] == [None] * 4
        assert_intact(root, 2, trainers)


def test_a_node_waits_for_a_slow_rank_only_for_a_limited_time(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 3) for rank in range(3)]
    save_id = new_save_id()
    directory = root / file_names.iteration_dir(1)
    began = time.monotonic()
    with blocked_open(directory / file_names.shard_name(1, save_id)) as unblock:
        for trainer in trainers:
            trainer.stage(1, save_id)
        alone = [directory / file_names.record_name(rank, save_id) for rank in (0, 2)]
        eventually("the records of the others", lambda: all(path.exists() for path in alone))
        assert time.monotonic() - began >= 2.0
        assert trainers[0].client.poll(0.0).finished == ()
        unblock()
        assert [trainer.outcome().error for trainer in trainers] == [None] * 3
    assert_intact(root, 1, trainers)


@pytest.mark.parametrize(
    ("point", "is_written_again"),
    [("persist.durable:2", True), ("put.written:1", True), ("persist.record:1", False)],
    ids=["one rank is not durable", "no record", "one record"],
)
def test_the_successor_of_a_killed_agent_publishes_missing_records(
    node: Node,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    is_written_again: bool,
) -> None:
    monkeypatch.setenv(VARIABLE, f"agent:{point}:KILL:{tmp_path / 'reached'}")
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    agent = trainers[0].client.agent_pid
    save_id = stage_all(trainers, 1)
    eventually("the end of the agent", lambda: not is_alive(agent))
    shard = root / file_names.iteration_dir(1) / file_names.shard_name(0, save_id)
    before = shard.stat().st_mtime_ns
    for trainer in trainers:
        assert trainer.reconnect() == (save_id,)
    assert [trainer.outcome().error for trainer in trainers] == [None, None]
    assert_intact(root, 1, trainers)
    assert (shard.stat().st_mtime_ns != before) is is_written_again


# ---------------------------------------------------------------------- when records are due


def test_records_wait_for_connected_and_writing_ranks_of_this_job(root: Path) -> None:
    save = written(PosixStorage(root), SAVE_ID, 0, 4, 2)
    assert is_due(save, {0, 1})
    assert is_due(save, {0, 1, 4, 9}), "ranks 4 and 9 belong to another job of this node"
    assert is_due(save, ()), "the trainers of the other ranks are gone"
    assert not is_due(save, {0, 1, 2}), "rank 2 will stage its slot in a moment"
    save.publish_by = time.monotonic()
    assert is_due(save, {0, 1, 2})
    save.publish_by += 60.0
    save.metas[3] = save.metas[0]
    assert not is_due(save, {0, 1}), "the shard of rank 3 is being written"


@pytest.mark.parametrize(
    ("since_s", "wait_s"), [(0.0, 2.0), (8.0, 2.0), (24.0, 6.0), (40.0, 10.0), (900.0, 10.0)]
)
def test_a_longer_save_waits_longer_within_bounds(
    root: Path, since_s: float, wait_s: float
) -> None:
    save = written(PosixStorage(root), SAVE_ID)
    (record,) = save.unpublished.values()
    save.unpublished.clear()
    save.staged_at = time.monotonic() - since_s
    before = time.monotonic()
    save.hold_record(record)
    late_s = time.monotonic() - before
    assert wait_s - 0.01 <= save.publish_by - before <= wait_s + 2 * late_s + 0.01
    by = save.publish_by
    save.hold_record(record)
    assert save.publish_by == by, "later ranks do not extend the wait of the first"


@pytest.mark.parametrize("why", ["error", "given_up", "past", "is_abandoned"])
def test_a_save_that_cannot_be_committed_publishes_no_record(root: Path, why: str) -> None:
    save = written(PosixStorage(root), SAVE_ID)
    setattr(save, why, True)
    assert not is_due(save, {0})
    publish(save, {0}, LOCK)
    assert not list((root / DIRECTORY).glob("*.commit"))


def test_a_node_does_not_commit_before_its_own_records_are_put(root: Path) -> None:
    save = written(PosixStorage(root), SAVE_ID)
    assert outcome_of(save, 60.0) == (False, None)
    assert save.gone_since is None, "the node does not report its own records as removed"
    publish(save, {0}, LOCK)
    assert outcome_of(save, 60.0) == (True, None)
    assert stored(root, 5).manifest.save_id == SAVE_ID


# ---------------------------------------------------------------------- errors of the put


class _RefusingStorage(PosixStorage):
    """Storage that refuses puts with an error; if `done`, it carries out the put first."""

    number, count, done = 0, 0, False

    def put(
        self,
        name: str,
        data: bytes,
        durable: Durable = "name",
        guard: Callable[[], None] | None = None,
    ) -> None:
        if self.done or not self.count:
            super().put(name, data, durable, guard)
        if self.count:
            self.count -= 1
            raise StorageError(self.number, os.strerror(self.number))


def refused(root: Path, number: int, count: int, *, done: bool = False) -> PendingSave:
    storage = _RefusingStorage(root)
    save = written(storage, SAVE_ID, 1, 3, 2)
    storage.number, storage.count, storage.done = number, count, done
    publish(save, {1, 2}, LOCK)
    return save


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT], ids=errno.errorcode.get)
def test_a_transient_error_is_retried_after_a_pause(root: Path, number: int) -> None:
    save = refused(root, number, 1)
    assert (save.error, len(save.unpublished)) == (None, 2)
    assert not is_due(save, {1, 2}), "the retry waits for the pause"
    save.publish_again_at = 0.0
    publish(save, {1, 2}, LOCK)
    assert (save.unpublished, save.publish_failures) == ({}, 0)
    assert (root / DIRECTORY / file_names.record_name(1, SAVE_ID, 2)).exists()


def test_retries_end_with_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "_RETRIES_S", (0.0, 0.0))
    save = refused(root, errno.ETIMEDOUT, 3)
    for _ in range(2):
        assert save.error is None
        publish(save, {1, 2}, LOCK)
    assert os.strerror(errno.ETIMEDOUT) in (save.error or "")
    assert save.failed == {1, 2}


def test_a_lasting_error_fails_the_save_for_the_ranks_of_the_record(root: Path) -> None:
    save = refused(root, errno.EDQUOT, 1)
    assert os.strerror(errno.EDQUOT) in (save.error or "")
    assert save.failed == {1, 2}
    assert outcome_of(save, 60.0) == (True, save.error)
    assert (root / DIRECTORY / file_names.failure_name(1, SAVE_ID)).read_text() == save.error
    forget(save)
    assert not list((root / DIRECTORY).glob("*.safetensors"))


@pytest.mark.parametrize("listing", ["new", "old"])
def test_after_a_put_with_unknown_result_the_committing_node_decides(
    root: Path, listing: str
) -> None:
    committing = persisted(PosixStorage(root), SAVE_ID, 0, 3)
    old = committing.storage.list(DIRECTORY)
    save = refused(root, errno.EDQUOT, 1, done=True)
    if listing == "old":
        save.storage.list = lambda directory: old  # type: ignore[method-assign]
    forget(save)
    assert len(list((root / DIRECTORY).glob("rank_0000[12]-*.safetensors"))) == 2
    assert outcome_of(committing, 60.0) == (True, None)


# ---------------------------------------------------------------------- who removes what


@pytest.mark.parametrize("failed", [1, 2])
def test_a_node_keeps_its_files_while_a_record_names_the_failed_rank(
    root: Path, failed: int
) -> None:
    """A former agent had put one record for both ranks."""
    save = persisted(PosixStorage(root), SAVE_ID, 1, 3, 2)
    save.error, save.failed = "no space", {failed}
    before = sorted(os.listdir(root / DIRECTORY))
    forget(save)
    assert sorted(os.listdir(root / DIRECTORY)) == before


def test_a_node_removes_its_record_if_none_names_the_failed_rank(
    root: Path,
) -> None:
    save = persisted(PosixStorage(root), SAVE_ID, 1, 4, 2)
    save.metas[3] = save.metas[1]
    save.error, save.failed = "no space", {3}
    forget(save)
    assert not (root / DIRECTORY).exists()


def test_a_node_asks_for_the_last_record_by_its_name(root: Path) -> None:
    """All nodes have equally many ranks, so the names of missing records are known."""
    saves = [persisted(PosixStorage(root), SAVE_ID, rank, 64, 2) for rank in range(0, 60, 2)]
    assert outcome_of(saves[0], 60.0) == (False, None)
    assert saves[0].missing == [60, 61, 62, 63]
    assert saves[0].missing_records == [
        file_names.record_name(rank, SAVE_ID, 2) for rank in (60, 62)
    ]
    storage = saves[0].storage
    old = storage.list(DIRECTORY)
    storage.list = lambda directory: old  # type: ignore[method-assign]
    saves += [persisted(PosixStorage(root), SAVE_ID, rank, 64, 2) for rank in (60, 62)]
    assert outcome_of(saves[0], 60.0) == (True, None)
