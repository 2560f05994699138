"""Markers of commits: waiting nodes read them, and a manifest overrides any marker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.agent import commit_records, markers, presence
from megatron_flashckpt.agent.commit import commit, outcome_of
from megatron_flashckpt.agent.failed_save import forget
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.agent.tidying import CommittedSave, tidy
from megatron_flashckpt.catalog.retention import retire
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.config import Retention
from megatron_flashckpt.file_format import file_names, manifest
from megatron_flashckpt.storage.base import Durable
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_faulty_storage import agent_here
from tests.agent.test_shard_writer import stored
from tests.support.persisting import persisted
from tests.support.trainer import new_save_id

A, B = "a" * 12, "b" * 12
DIRECTORY = file_names.iteration_dir(5)
OPEN = (False, None)
DONE = (True, None)


class CountingStorage(PosixStorage):
    """Real storage that counts listings, reads and bytes."""

    def __init__(self, root: Path, *_: object) -> None:
        super().__init__(root)
        self.listed = self.read_nbytes = 0
        self.steps: list[str] = []
        self._lock = threading.Lock()

    def list(self, directory: str) -> list[str]:
        with self._lock:
            self.listed += 1
        return super().list(directory)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        contents = super().read(name, offset, nbytes)
        with self._lock:
            self.read_nbytes += len(contents)
        return contents

    def put(
        self,
        name: str,
        data: bytes,
        durable: Durable = "name",
        guard: Callable[[], None] | None = None,
    ) -> None:
        self.steps.append(f"put {name.rpartition('/')[2]}")
        super().put(name, data, durable, guard)

    def delete(self, name: str) -> None:
        self.steps.append(f"delete {name.rpartition('/')[2]}")
        super().delete(name)


def pair(root: Path, save_id: str) -> list[PendingSave]:
    """Return a save of two nodes with one rank each, as both nodes know the save."""
    return [persisted(CountingStorage(root), save_id, rank, 2) for rank in range(2)]


def marker(root: Path, save_id: str) -> Path:
    return root / DIRECTORY / file_names.marker_name(save_id)


@pytest.fixture(autouse=True)
def no_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent listings by waiting nodes, even if a test takes long."""
    monkeypatch.setattr("megatron_flashckpt.agent.presence._FIRST_S_PER_RANK", 1e6)
    monkeypatch.setattr("megatron_flashckpt.agent.presence._FIRST_S", 1e6)


def test_of_64_nodes_63_read_a_marker_and_no_node_lists(root: Path) -> None:
    """Before, every waiting node listed the directory once and read the whole manifest."""
    nodes = 64
    storages = [CountingStorage(root) for _ in range(nodes)]
    last = nodes - 1
    saves = [persisted(storages[rank], A, rank, nodes) for rank in range(last)]
    rounds = 0
    while not all(outcome_of(save, 60.0) == OPEN for save in saves) or rounds < 20:
        rounds += 1
    saves.append(persisted(storages[last], A, last, nodes))
    assert outcome_of(saves[0], 60.0) == DONE
    for storage in storages:
        storage.read_nbytes = 0
    assert [outcome_of(save, 60.0) for save in saves[1:]] == [DONE] * last
    nbytes = (root / DIRECTORY / file_names.MANIFEST).stat().st_size
    assert nbytes > 10_000
    assert all(0 < storage.read_nbytes < 300 for storage in storages[1:])
    assert [storage.listed for storage in storages[1:]] == [0] * last
    # The committing node asks 20 times for one missing record, in an otherwise unchanged directory.
    assert storages[0].listed < 5


def test_a_marker_agrees_with_the_manifest(root: Path) -> None:
    saves = pair(root, A)
    assert [outcome_of(save, 60.0) for save in saves] == [DONE, DONE]
    assert saves[0].cost == saves[1].cost
    whole = manifest.decode_facts((root / DIRECTORY / file_names.MANIFEST).read_bytes(), "it")
    assert saves[0].cost == whole.cost


def test_a_job_of_one_node_puts_no_marker(root: Path) -> None:
    assert outcome_of(persisted(PosixStorage(root), A), 60.0) == DONE
    assert not marker(root, A).exists()


def test_a_marker_is_removed_together_with_its_checkpoint(root: Path) -> None:
    saves = pair(root, A)
    commit(saves[0])
    assert marker(root, A).exists()
    assert verify(stored(root, 5)) == []
    tidy(CommittedSave.of(saves[0]))
    assert marker(root, A).exists(), "other nodes may read the marker later"
    retire(PosixStorage(root), Retention(latest=1), retain_interval=None, tracked=5, previous=None)
    assert marker(root, A).exists()
    (root / file_names.iteration_dir(6)).mkdir()
    renamed = (root / DIRECTORY / file_names.MANIFEST).read_bytes()
    decoded = manifest.decode_manifest(renamed, "it")
    newer = manifest.encode_manifest(msgspec.structs.replace(decoded, iteration=6))
    (root / file_names.iteration_dir(6) / file_names.MANIFEST).write_bytes(newer)
    retire(PosixStorage(root), Retention(latest=1), retain_interval=None, tracked=6, previous=None)
    assert not (root / DIRECTORY).exists()


# ---------------------------------------------------------------------- the manifest decides


def test_a_marker_without_a_manifest_is_no_commit(root: Path) -> None:
    saves = pair(root, A)
    commit(saves[0])
    (root / DIRECTORY / file_names.MANIFEST).rename(root / "elsewhere")
    assert outcome_of(saves[1], 60.0) == OPEN


@pytest.mark.parametrize("kept", ["the marker of the former save", "no marker"])
def test_a_manifest_of_another_save_overrides_the_marker(
    root: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    monkeypatch.setattr(markers, "_UNMARKED_S", 0.0)
    former, later = pair(root, A), pair(root, B)
    commit(former[0])
    stale = marker(root, A).read_bytes()
    commit(later[0])
    if kept != "no marker":
        marker(root, A).write_bytes(stale)
    assert outcome_of(former[1], 60.0) == OPEN
    assert outcome_of(later[1], 60.0) == DONE


def test_the_former_marker_is_removed_before_its_manifest(root: Path) -> None:
    commit(pair(root, A)[0])
    later = pair(root, B)
    storage = later[0].storage
    assert isinstance(storage, CountingStorage)
    storage.steps.clear()
    commit(later[0])
    assert storage.steps == [
        f"put {file_names.common_name(B)}",
        f"delete {file_names.marker_name(A)}",
        f"put {file_names.MANIFEST}",
        f"put {file_names.marker_name(B)}",
        f"put {file_names.TRACKER}",
    ]


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_node_reads_the_manifest_if_it_cannot_read_a_marker(
    root: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    """A marker is missing if the committing agent was killed before its put, or is older."""
    saves = pair(root, A)
    commit(saves[0])
    if damage is None:
        marker(root, A).unlink()
        storage = saves[1].storage
        assert isinstance(storage, CountingStorage)
        storage.read_nbytes = 0
        assert outcome_of(saves[1], 60.0) == OPEN, "the marker may come in a moment"
        assert storage.read_nbytes == 0
        saves[1].unmarked_since = None
        monkeypatch.setattr(markers, "_UNMARKED_S", 0.0)
    else:
        marker(root, A).write_bytes(damage)
    assert outcome_of(saves[1], 60.0) == DONE


def test_a_node_that_awaits_the_marker_does_not_report_tidied_records(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage refused the marker, and the job keeps no history."""
    monkeypatch.setattr(commit_records, "_GONE_S", 0.0)
    monkeypatch.setattr(presence, "_FIRST_S", 0.0)  # the node lists the directory at once
    saves = pair(root, A)
    commit(saves[0])
    tidy(CommittedSave.of(saves[0]))
    marker(root, A).unlink()
    for _ in range(3):
        assert outcome_of(saves[1], 60.0) == OPEN, "the marker may come in a moment"
    monkeypatch.setattr(markers, "_UNMARKED_S", -60.0)
    assert outcome_of(saves[1], 60.0) == DONE


def test_a_node_that_gave_up_keeps_its_files_if_the_save_is_committed(root: Path) -> None:
    saves = pair(root, A)
    commit(saves[0])
    tidy(CommittedSave.of(saves[0]))
    marker(root, A).unlink()
    saves[1].called_off = True  # this flag would allow the node to remove its files
    forget(saves[1])
    assert verify(stored(root, 5)) == []


def test_a_successor_of_an_agent_killed_after_the_manifest_puts_the_marker(root: Path) -> None:
    saves = pair(root, A)
    commit(saves[0])
    marker(root, A).unlink()
    (root / file_names.TRACKER).unlink()
    successor = PendingSave(
        PosixStorage(root), 5, A, saves[0].staged_at, {0: saves[0].metas[0]}, {0}
    )
    assert outcome_of(successor, 60.0) == DONE
    assert (root / file_names.TRACKER).read_text() == "5"
    assert outcome_of(saves[1], 60.0) == DONE
    assert marker(root, A).exists()


# ---------------------------------------------------------------------- with real agents


def test_a_waiting_agent_reads_no_manifest(
    node: Node, other_node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of rank 0 is a process; the other one runs here, on storage that records reads."""
    read: list[tuple[str, int]] = []

    class RecordingStorage(PosixStorage):
        def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
            data = super().read(name, offset, nbytes)
            read.append((name, len(data)))
            return data

        def present(self, directory: str, names: Iterable[str]) -> set[str]:
            return super().present(directory, names)

    monkeypatch.setattr("megatron_flashckpt.agent.state.open_storage", RecordingStorage)
    first = node.trainer(root, 0, 2)
    with agent_here(other_node, root):
        second = other_node.trainer(root, 1, 2)
        save_id = new_save_id()
        for trainer in (first, second):
            trainer.stage(1, save_id)
        assert [trainer.outcome().error for trainer in (first, second)] == [None, None]
    of_manifest = [nbytes for name, nbytes in read if name.endswith(file_names.MANIFEST)]
    assert of_manifest == [manifest.HEAD_NBYTES]
    nbytes = os.path.getsize(root / file_names.iteration_dir(1) / file_names.marker_name(save_id))
    assert (f"{file_names.iteration_dir(1)}/{file_names.marker_name(save_id)}", nbytes) in read
    assert nbytes < 300
