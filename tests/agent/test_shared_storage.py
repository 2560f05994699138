"""Commits on storage that several nodes share and that reports transient errors."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from megatron_flashckpt.agent.commit import outcome_of
from megatron_flashckpt.agent.failed_save import forget, leave_note

from megatron_flashckpt.agent import commit as commit_module
from megatron_flashckpt.agent import failed_save
from megatron_flashckpt.catalog.tracker import tracked_before_commit
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.base import Durable
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.test_shard_writer import stored
from tests.support.persisting import persisted

SAVE_ID = "a" * 12
DIRECTORY = file_names.iteration_dir(5)
OPEN = (False, None)
PASSING = [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN]


class _FailingStorage(PosixStorage):
    """Real storage that fails the next `count` calls with an error."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.number, self.count = 0, 0

    def fail_calls(self, number: int, count: int = 1) -> None:
        self.number, self.count = number, count

    def _maybe(self) -> None:
        if self.count:
            self.count -= 1
            raise StorageError(self.number, os.strerror(self.number))

    def list(self, directory: str) -> list[str]:
        self._maybe()
        return super().list(directory)

    def present(self, directory: str, names: Iterable[str]) -> set[str]:
        self._maybe()
        return super().present(directory, names)

    def put(
        self,
        name: str,
        data: bytes,
        durable: Durable = "name",
        guard: Callable[[], None] | None = None,
    ) -> None:
        self._maybe()
        super().put(name, data, durable, guard)


def _of_rank(root: Path, rank: int) -> set[str]:
    """Return the files of `rank` in the directory of the save."""
    return {path.name for path in (root / DIRECTORY).glob(f"rank_{rank:05d}-*")}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_save, "_NOTE_RETRIES_S", (0.0, 0.0))


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("troubled", [0, 1])
def test_a_transient_error_breaks_no_commit(root: Path, number: int, troubled: int) -> None:
    storages = [_FailingStorage(root), _FailingStorage(root)]
    saves = [persisted(storage, SAVE_ID, rank, 2) for rank, storage in enumerate(storages)]
    storages[troubled].fail_calls(number)
    assert outcome_of(saves[troubled], 60.0) == OPEN
    for save in saves:
        assert outcome_of(save, 60.0) == (True, None)
    assert [shard.rank for shard in stored(root, 5).manifest.shards] == [0, 1]
    assert {file_names.shard_name(rank, SAVE_ID) for rank in range(2)} <= set(
        os.listdir(root / DIRECTORY)
    )


def test_errors_far_apart_do_not_add_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module, "_TROUBLE_S", 0.2)
    monkeypatch.setattr(commit_module, "_WRITER_S", 0.0)
    storage = _FailingStorage(root)
    save = persisted(storage, SAVE_ID)
    save.persisted.clear()
    for _ in range(2):
        storage.fail_calls(errno.ESTALE)
        assert outcome_of(save, 60.0) == OPEN
        assert outcome_of(save, 60.0) == OPEN, "storage works again"
        time.sleep(0.3)


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_an_error_while_the_tracker_moves_is_retried(root: Path, number: int) -> None:
    storage = _FailingStorage(root)
    save = persisted(storage, SAVE_ID)
    storage.fail_calls(number)
    storage.list = lambda directory: PosixStorage.list(storage, directory)  # type: ignore[method-assign]
    assert outcome_of(save, 60.0) == OPEN, "the put of the common state failed"
    assert outcome_of(save, 60.0) == (True, None)
    assert (root / file_names.TRACKER).read_text() == "5"


def test_a_node_that_times_out_leaves_its_files_to_the_committing_node(root: Path) -> None:
    committing = persisted(PosixStorage(root), SAVE_ID, 0, 2)
    waiting = persisted(PosixStorage(root), SAVE_ID, 1, 2)
    finished, error = outcome_of(waiting, 0.0)
    assert finished
    assert error is not None
    forget(waiting)
    assert len(_of_rank(root, 1)) == 2, "the record and the shard of rank 1 stay"
    assert outcome_of(committing, 60.0) == (True, None)
    assert file_names.shard_name(1, SAVE_ID) in os.listdir(root / DIRECTORY)


def test_a_node_removes_its_files_after_the_committing_node_gave_up(root: Path) -> None:
    committing = persisted(PosixStorage(root), SAVE_ID, 0, 3)
    waiting = persisted(PosixStorage(root), SAVE_ID, 1, 3)
    finished, error = outcome_of(committing, 0.0)
    assert finished
    assert error is not None
    assert outcome_of(waiting, 60.0) == (True, error)
    forget(waiting)
    assert _of_rank(root, 1) == set()


def test_a_node_without_a_record_of_its_rank_removes_its_files(root: Path) -> None:
    save = persisted(PosixStorage(root), SAVE_ID, 1, 2)
    (root / DIRECTORY / file_names.record_name(1, SAVE_ID)).unlink()
    save.error, save.failed = "no space", {1}
    assert outcome_of(save, 60.0) == (True, "no space")
    forget(save)
    assert file_names.shard_name(1, SAVE_ID) not in os.listdir(root / DIRECTORY)


def test_a_node_with_a_record_of_its_failed_rank_keeps_its_files(
    root: Path,
) -> None:
    """Storage put the record but reported an error; the committing node saw the record."""
    committing = persisted(PosixStorage(root), SAVE_ID, 0, 2)
    failed = persisted(PosixStorage(root), SAVE_ID, 1, 2)
    failed.error, failed.failed = "timed out", {1}
    forget(failed)
    assert outcome_of(committing, 60.0) == (True, None)
    assert file_names.shard_name(1, SAVE_ID) in os.listdir(root / DIRECTORY)


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_a_committing_node_that_gives_up_notifies_the_others(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(commit_module, "_TROUBLE_S", 0.0)
    storage = _FailingStorage(root)
    committing = persisted(storage, SAVE_ID, 0, 2)
    waiting = persisted(PosixStorage(root), SAVE_ID, 1, 2)
    storage.fail_calls(number)
    assert outcome_of(committing, 60.0) == (True, os_error(number))
    assert outcome_of(waiting, 60.0) == (True, os_error(number))


@pytest.mark.parametrize(
    ("number", "gives_up"), [(errno.EIO, True), (errno.ETIMEDOUT, False)], ids=["EIO", "ETIMEDOUT"]
)
def test_a_node_with_a_dead_device_gives_up_early_and_keeps_its_files(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, gives_up: bool
) -> None:
    committing = persisted(PosixStorage(root), SAVE_ID, 0, 2)
    storage = _FailingStorage(root)
    waiting = persisted(storage, SAVE_ID, 1, 2)
    storage.fail_calls(number, count=3)
    assert outcome_of(waiting, 60.0) == OPEN
    monkeypatch.setattr(commit_module, "_DEAD_DISK_S", 0.0)
    assert outcome_of(waiting, 60.0) == ((True, os_error(number)) if gives_up else OPEN)
    forget(waiting)
    assert len(_of_rank(root, 1)) == 2, "the record and the shard of rank 1 stay"
    assert outcome_of(committing, 60.0) == (True, None)


def os_error(number: int) -> str:
    return str(StorageError(number, os.strerror(number)))


@pytest.mark.parametrize("damage", ["removed", "cut short"])
def test_a_shard_that_differs_from_its_record_is_not_committed(
    root: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(commit_module, "_TROUBLE_S", 0.0)  # a shard may also become visible late
    committing = persisted(PosixStorage(root), SAVE_ID, 0, 2)
    waiting = persisted(PosixStorage(root), SAVE_ID, 1, 2)
    shard = root / DIRECTORY / file_names.shard_name(1, SAVE_ID)
    if damage == "removed":
        shard.unlink()
    else:
        os.truncate(shard, 10)
    finished, error = outcome_of(committing, 60.0)
    assert finished
    assert error is not None
    assert shard.name in error
    assert not (root / DIRECTORY / file_names.MANIFEST).exists()
    assert not (root / file_names.TRACKER).exists()
    assert outcome_of(waiting, 60.0) == (True, error)


def test_a_node_retries_its_note_until_the_put_succeeds(root: Path) -> None:
    storage = _FailingStorage(root)
    persisted(storage, SAVE_ID)
    storage.fail_calls(errno.ESTALE, count=2)
    leave_note(storage, 5, SAVE_ID, 0, "no space")
    assert (root / DIRECTORY / file_names.failure_name(0, SAVE_ID)).read_text() == "no space"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_briefly_unreadable_manifest_still_protects_its_shards(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The tracker could not move, so the save has failed, but its checkpoint is complete."""
    storage = _FailingStorage(root)
    save = persisted(storage, SAVE_ID)
    assert outcome_of(save, 60.0) == (True, None)
    before = set(os.listdir(root / DIRECTORY))

    def refuse(*args: object) -> bytes:
        raise StorageError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(storage, "read", refuse)
        forget(save)
        with pytest.raises(StorageError):
            tracked_before_commit(storage)
    assert set(os.listdir(root / DIRECTORY)) == before
