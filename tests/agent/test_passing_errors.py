"""Transient errors and names that become visible late: one answer of storage is not trusted."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from megatron_flashckpt.agent import claim as claims
from megatron_flashckpt.agent import cleanup
from megatron_flashckpt.agent import commit as commit_module
from megatron_flashckpt.agent.claim import ENDED, TRAINING
from megatron_flashckpt.agent.cleanup import Sweeper
from megatron_flashckpt.agent.commit import commit, outcome_of
from megatron_flashckpt.agent.failed_save import forget
from megatron_flashckpt.catalog.retention import finish
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_cleanup import half_a_save, plant, resume
from tests.agent.test_faulty_storage import agent_here
from tests.agent.test_shard_writer import stored
from tests.support.persisting import persisted
from tests.support.trainer import eventually

SAVE = "a" * 12
DIRECTORY = file_names.iteration_dir(5)
OPEN = (False, None)


class UnreliableStorage(PosixStorage):
    """Real storage that fails each of some calls once, and may carry out the call first."""

    def __init__(self, root: Path, *calls: str, done: bool = False) -> None:
        super().__init__(root)
        self._calls, self._done = set(calls), done

    def _call(self, call: str, name: str) -> None:
        is_refused = call in self._calls
        self._calls.discard(call)
        if not is_refused or self._done:
            getattr(super(), call)(name)
        if is_refused:
            raise StorageError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def delete(self, name: str) -> None:
        self._call("delete", name)

    def delete_directory(self, name: str) -> None:
        self._call("delete_directory", name)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "_RETRIES_S", (0.0, 0.0))


@pytest.mark.parametrize("done", [True, False], ids=["done all the same", "not done"])
@pytest.mark.parametrize("call", ["delete", "delete_directory"])
def test_a_failed_removal_leaves_no_empty_directory(root: Path, call: str, done: bool) -> None:
    plant(root, 5, *half_a_save(SAVE)[:1])
    sweeper = Sweeper(UnreliableStorage(root, call, done=done))
    resume(sweeper)
    assert not (root / DIRECTORY).exists()


@pytest.mark.parametrize("call", ["delete", "delete_directory"])
def test_a_failed_removal_leaves_no_files_of_a_failed_save(root: Path, call: str) -> None:
    save = persisted(UnreliableStorage(root, call), SAVE)
    forget(save)
    assert not (root / DIRECTORY).exists()


class Undeletable(PosixStorage):
    """Real storage that cannot remove directories."""

    def delete_directory(self, name: str) -> None:
        raise StorageError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


@pytest.mark.parametrize("remover", ["agent", "sweeper"])
def test_an_empty_directory_that_could_not_be_removed_goes_after_later_commits(
    root: Path, remover: str
) -> None:
    (newer,) = plant(root, 30, half_a_save("b" * 12)[0])
    newer.unlink()
    if remover == "agent":
        forget(persisted(Undeletable(root), SAVE))
    else:
        plant(root, 5, half_a_save(SAVE)[0])
        resume(Sweeper(Undeletable(root)))
    assert os.listdir(root / DIRECTORY) == []
    sweeper = Sweeper(PosixStorage(root))  # of the same agent, or of the next one
    for committed in (10, 20):
        assert (root / DIRECTORY).exists()
        sweeper.find_orphans(lambda iteration: False, committed)
        sweeper.sweep()
    assert not (root / DIRECTORY).exists()
    assert newer.parent.exists(), "another node may be about to fill it"


class UnreadableOnce(PosixStorage):
    """Real storage whose first read of a manifest fails."""

    is_refused = True

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        if name.endswith(file_names.MANIFEST) and self.is_refused:
            self.is_refused = False
            raise StorageError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return super().read(name, offset, nbytes)


def test_a_directory_that_could_not_be_examined_is_examined_after_the_next_commit(
    root: Path,
) -> None:
    commit(persisted(PosixStorage(root), SAVE))
    (record,) = plant(root, 5, file_names.record_name(0, "b" * 12))
    storage = UnreadableOnce(root)
    sweeper = Sweeper(storage)
    sweeper.find_orphans(lambda iteration: False, 10)
    for committed in (20, 30):
        assert record.exists()
        sweeper.find_orphans(lambda iteration: False, committed)
        sweeper.sweep()
    assert not record.exists()
    assert not storage.is_refused


def test_an_unfinished_removal_is_not_treated_as_a_lost_manifest(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention has moved the manifest, and finishes the removal after a later commit."""
    storage = PosixStorage(root)
    commit(persisted(storage, SAVE))
    for record in (root / DIRECTORY).glob("*.commit"):
        record.unlink()
    (root / DIRECTORY / file_names.MANIFEST).rename(root / file_names.removal_name(5, SAVE))
    before = sorted(os.listdir(root / DIRECTORY))
    sweeper = Sweeper(storage)
    resume(sweeper)
    assert "put the manifest back" not in caplog.text
    assert sorted(os.listdir(root / DIRECTORY)) == before, "retention removes these files"
    finish(storage)
    assert not (root / DIRECTORY).exists()


class LateShardsStorage(PosixStorage):
    """Real storage that hides the shards of other nodes until `has_come` is set."""

    has_come = False

    def _is_hidden(self, name: str) -> bool:
        return not self.has_come and file_names.shard_name(1, SAVE) in name

    def size(self, name: str) -> int:
        if self._is_hidden(name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return super().size(name)

    def present(self, directory: str, names: Iterable[str]) -> set[str]:
        return {name for name in super().present(directory, names) if not self._is_hidden(name)}


def test_a_shard_that_becomes_visible_late_fails_no_save(root: Path) -> None:
    storage = LateShardsStorage(root)
    committing, other = (persisted(storage, SAVE, rank, 2) for rank in range(2))
    for _ in range(2):
        assert outcome_of(committing, 60.0) == OPEN
    assert not (root / DIRECTORY / file_names.MANIFEST).exists()
    assert outcome_of(other, 60.0) == OPEN, "no node has cancelled the save"
    storage.has_come = True
    assert outcome_of(committing, 60.0) == (True, None)
    assert [shard.rank for shard in stored(root, 5).manifest.shards] == [0, 1]


def test_a_shard_that_stays_invisible_fails_the_save(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LateShardsStorage(root)
    committing, _ = (persisted(storage, SAVE, rank, 2) for rank in range(2))
    assert outcome_of(committing, 60.0) == OPEN
    monkeypatch.setattr(commit_module, "_TROUBLE_S", 0.0)
    finished, error = outcome_of(committing, 60.0)
    assert finished
    assert f"{file_names.shard_name(1, SAVE)} is missing" in (error or "")
    assert not (root / DIRECTORY / file_names.MANIFEST).exists()


def test_a_missing_shard_of_the_committing_node_fails_the_save_at_once(root: Path) -> None:
    save = persisted(PosixStorage(root), SAVE)
    (root / DIRECTORY / file_names.shard_name(0, SAVE)).unlink()
    finished, error = outcome_of(save, 60.0)
    assert finished
    assert "is missing" in (error or "")


def test_an_agent_retries_the_last_renewal_of_its_claim(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next start waits until the claim has been silent for long enough."""
    refused = []
    renew = claims.renew

    def refuse_once(storage: object, former: claims.Claim, claim: claims.Claim) -> bool:
        if claim.state == ENDED and not refused:
            refused.append(claim)
            raise StorageError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return renew(storage, former, claim)  # type: ignore[arg-type]

    def state() -> int:
        claim = claims.read(PosixStorage(root))
        assert claim is not None
        return claim.state

    monkeypatch.setattr(claims, "renew", refuse_once)
    with agent_here(node, root):
        trainer = node.trainer(root)
        trainer.claim()
        assert trainer.save(1).error is None
        assert state() == TRAINING
        trainer.hang_up()
    eventually("the last renewal", lambda: state() == ENDED)
    assert refused
