"""Removal of files that a killed agent left: its successor removes these files and no others."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest

from megatron_flashckpt.agent import cleanup
from megatron_flashckpt.agent.cleanup import Sweeper
from megatron_flashckpt.agent.commit import commit
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.base import temporary_name
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact
from tests.agent.test_faulty_storage import agent_here
from tests.agent.test_shard_writer import stored
from tests.support.persisting import persisted
from tests.support.trainer import PATIENCE_S, eventually, is_alive, new_save_id, remove_tree


def listing(root: Path) -> set[str]:
    """Return all paths below `root`, while the agent may remove some of them."""
    return {
        os.path.relpath(os.path.join(where, name), root)
        for where, directories, files in os.walk(root)
        for name in (*directories, *files)
    }


def plant(root: Path, iteration: int, *files: str) -> list[Path]:
    """Put files into the directory of an iteration; return the paths of all."""
    directory = root / file_names.iteration_dir(iteration)
    directory.mkdir(parents=True, exist_ok=True)
    planted = [directory / name for name in files]
    for path in planted:
        path.write_text("half a save")
    return planted


def half_a_save(save_id: str) -> tuple[str, ...]:
    return (
        file_names.shard_name(0, save_id),
        file_names.shard_name(7, save_id),
        file_names.record_name(0, save_id),
        file_names.record_name(8, save_id, 8),
        file_names.failure_name(7, save_id),
        file_names.common_name(save_id),
        temporary_name(file_names.common_name(save_id)),
        temporary_name(file_names.record_name(1, save_id)),
        temporary_name(file_names.record_name(16, save_id, 8)),
        temporary_name(file_names.MANIFEST),
    )


def resume(sweeper: Sweeper, resumed: int | None = None) -> None:
    """Let a job resume while no save is pending, and remove what the second look finds again."""
    with mock.patch.object(cleanup, "_SETTLE_S", 0.0):
        sweeper.find_orphans_soon(lambda iteration: False, resumed)
    sweeper.sweep()


def test_a_commit_removes_orphaned_files_of_older_saves_only(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    assert trainer.save(10).error is None
    checkpoint = listing(root)
    plant(root, 5, *half_a_save("aaaaaaaaaaaa"))
    plant(root, 10, *half_a_save("bbbbbbbbbbbb"))
    newer = plant(root, 99, *half_a_save("cccccccccccc"))
    (root / temporary_name(file_names.TRACKER)).touch()
    (root / temporary_name(file_names.HISTORY)).touch()
    trainer.hang_up(leave=True)
    eventually("the end of the agent", lambda: not is_alive(trainer.client.agent_pid))
    again = node.trainer(root)
    assert again.save(20).error is None
    assert (root / file_names.iteration_dir(5)).exists(), (
        "other nodes may still read why the save failed"
    )
    assert again.save(30).error is None
    again.hang_up(leave=True)
    eventually("the end of the agent", lambda: not is_alive(again.client.agent_pid))
    left = listing(root) - checkpoint - {str(path.relative_to(root)) for path in newer}
    assert {name for name in left if not name.startswith(("iter_0000020", "iter_0000030"))} == {
        file_names.iteration_dir(99)
    }
    assert not [name for name in left if name.endswith((".commit", ".tmp"))]
    assert_intact(root, 30, [again])


def test_a_resumed_job_removes_files_of_saves_that_no_agent_writes(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "_SETTLE_S", 0.3)
    with agent_here(node, root):
        trainer = node.trainer(root)
        assert trainer.save(10).error is None
        plant(root, 99, *half_a_save("cccccccccccc"))
        trainer.client.resume_from(None, 10)
        eventually(
            "the removal of the partial save",
            lambda: not (root / file_names.iteration_dir(99)).exists(),
        )
        assert_intact(root, 10, [trainer])


class HiddenManifests(PosixStorage):
    """Shared storage on which this node does not see the manifests of other nodes yet."""

    is_hiding = True

    def list(self, directory: str) -> list[str]:
        return sorted({*super().list(directory)} - self._hidden())

    def present(self, directory: str, names: Iterable[str]) -> set[str]:
        return super().present(directory, names) - self._hidden()

    def _hidden(self) -> set[str]:
        return {file_names.MANIFEST} if self.is_hiding else set()


def test_a_newer_checkpoint_whose_manifest_comes_late_survives_a_resume(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent that committed it was killed before it removed the records."""
    commit(persisted(PosixStorage(root), "a" * 12))
    (dead,) = plant(root, 6, file_names.shard_name(0, "b" * 12))
    before = listing(root)
    storage = HiddenManifests(root)
    sweeper = Sweeper(storage)
    sweeper.find_orphans_soon(lambda iteration: False)
    sweeper.sweep()
    assert listing(root) == before, "the second look is not due"
    with mock.patch.object(cleanup, "_SETTLE_S", 0.0):
        sweeper.find_orphans_soon(lambda iteration: False)
    storage.is_hiding = False
    sweeper.sweep()
    assert listing(root) == before - {str(dead.relative_to(root)), dead.parent.name}
    assert stored(root, 5)
    assert f"{file_names.iteration_dir(5)}: is a checkpoint, but this node saw" in caplog.text


def test_files_of_a_save_that_begins_between_both_looks_stay(root: Path) -> None:
    (dead,) = plant(root, 6, file_names.shard_name(0, "a" * 12))
    sweeper = Sweeper(PosixStorage(root))
    with mock.patch.object(cleanup, "_SETTLE_S", 0.0):
        sweeper.find_orphans_soon(lambda iteration: False)
    (new,) = plant(root, 6, file_names.shard_name(0, "b" * 12))
    (other,) = plant(root, 7, file_names.shard_name(0, "b" * 12))
    sweeper.sweep()
    assert not dead.exists()
    assert new.exists()
    assert other.exists()


def test_a_later_start_ends_the_search_of_the_former(root: Path) -> None:
    """The later start may have resumed from a save that the former start took for a dead one."""
    (dead,) = plant(root, 6, file_names.shard_name(0, "a" * 12))
    runs = ["first"]
    sweeper = Sweeper(PosixStorage(root))
    with mock.patch.object(cleanup, "_SETTLE_S", 0.0):
        sweeper.find_orphans_soon(lambda iteration: False, None, lambda: runs[-1] == "first")
    runs.append("second")
    sweeper.sweep()
    assert dead.exists()


def test_a_marker_shows_that_a_save_without_manifest_was_committed(root: Path) -> None:
    marker = file_names.marker_name("a" * 12)
    plant(root, 6, *half_a_save("a" * 12)[:3], marker)
    before = listing(root)
    resume(Sweeper(PosixStorage(root)))
    assert listing(root) == before


def test_only_rank_0_removes_orphaned_files(node: Node, root: Path) -> None:
    ranks = [node.trainer(root, rank, 2) for rank in range(2)]
    (planted,) = plant(root, 99, file_names.shard_name(0, "cccccccccccc"))
    ranks[1].client.resume_from(None, 0)
    save_id = new_save_id()
    for rank in ranks:
        rank.stage(10, save_id)
    assert [rank.outcome().error for rank in ranks] == [None, None]
    assert planted.exists()


def test_a_directory_without_our_files_stays_even_if_it_is_empty(root: Path) -> None:
    (root / file_names.iteration_dir(3)).mkdir(parents=True)
    plant(root, 4, "notes.txt")
    before = listing(root)
    sweeper = Sweeper(PosixStorage(root))
    resume(sweeper)
    assert listing(root) == before


def test_a_checkpoint_whose_manifest_a_user_moved_away_is_kept(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    assert [trainer.save(iteration).error for iteration in (10, 20)] == [None, None]
    manifest = root / file_names.iteration_dir(20) / file_names.MANIFEST
    eventually("the removal of commit records", lambda: not list(manifest.parent.glob("*.commit")))
    manifest.rename(manifest.with_suffix(".off"))
    before = listing(root / file_names.iteration_dir(20))
    plant(root, 20, *half_a_save("cccccccccccc"))
    trainer.client.resume_from(None, 10)
    log = node.log(root)
    eventually("the warning", lambda: "iter_0000020: the manifest of save" in log.read_text())
    for iteration in (30, 40):
        assert trainer.save(iteration).error is None
    eventually("the removal of the partial save", lambda: listing(manifest.parent) == before)


def test_a_record_that_became_visible_late_is_removed_when_a_job_resumes(root: Path) -> None:
    """A killed agent of another node had put the record; the commit did not see the file."""
    storage = PosixStorage(root)
    commit(persisted(storage, "a" * 12))
    sweeper = Sweeper(storage)
    for _ in range(2):
        resume(sweeper)
        assert not list(root.rglob("*.commit"))
        plant(root, 5, file_names.record_name(0, "a" * 12, 2))
    resume(sweeper)
    assert not list(root.rglob("*.commit"))
    assert stored(root, 5)


def test_foreign_files_stay_and_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    foreign = plant(root, 3, "mp_rank_00", "notes.txt", "manifest.json.bak", ".x.0123abcd.tmp")
    elsewhere = tmp_path / "elsewhere"
    plant(elsewhere, 4, file_names.shard_name(0, "aaaaaaaaaaaa"))
    (root / file_names.iteration_dir(4)).symlink_to(elsewhere / file_names.iteration_dir(4))
    (root / "iter_0000005").write_text("a file")
    (root / "logs").mkdir()
    before = listing(root)
    sweeper = Sweeper(PosixStorage(root))
    (own,) = plant(root, 3, file_names.shard_name(0, "aaaaaaaaaaaa"))
    resume(sweeper)
    assert not own.exists()
    assert listing(root) == before
    assert all(path.exists() for path in foreign)
    assert listing(elsewhere) == {
        "iter_0000004",
        "iter_0000004/rank_00000-aaaaaaaaaaaa.safetensors",
    }


def test_a_recreated_directory_is_searched_again(node: Node, root: Path) -> None:
    """An agent that hung makes the directory again after a later run removed that iteration."""
    assert node.trainer(root).save(10).error is None
    sweeper = Sweeper(PosixStorage(root))
    for committed in (10, 20):
        sweeper.find_orphans(lambda _: False, committed)
    remove_tree(root / file_names.iteration_dir(10))
    sweeper.find_orphans(lambda _: False, 30)
    plant(root, 10, *half_a_save("aaaaaaaaaaaa"))
    sweeper.find_orphans(lambda _: False, 40)
    sweeper.sweep()
    assert not (root / file_names.iteration_dir(10)).exists()


def test_files_found_by_a_slow_listing_are_removed_after_a_later_commit(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "_LOOK_S", 0.01)
    assert node.trainer(root).save(5).error is None
    eventually("the removal of commit records", lambda: not list(root.rglob("*.commit")))
    (orphan,) = plant(root, 5, file_names.shard_name(7, "aaaaaaaaaaaa"))
    storage, looked = PosixStorage(root), threading.Event()

    class SlowStorage(PosixStorage):
        def list(self, directory: str) -> list[str]:
            looked.wait(PATIENCE_S)
            return super().list(directory)

    sweeper = Sweeper(SlowStorage(root))
    sweeper.find_orphans_soon(lambda _: False)
    (late,) = (thread for thread in threading.enumerate() if thread.name == "look")
    looked.set()
    late.join(PATIENCE_S)
    sweeper.sweep()
    assert orphan.exists(), "the file may belong to a save that began meanwhile"
    for committed in (10, 20):
        sweeper.find_orphans(lambda _: False, committed)
        sweeper.sweep()
    assert not orphan.exists()
    assert storage.present(file_names.iteration_dir(5), [file_names.MANIFEST])


def test_a_save_under_way_keeps_its_files(root: Path) -> None:
    (planted,) = plant(root, 7, file_names.shard_name(0, "aaaaaaaaaaaa"))
    sweeper = Sweeper(PosixStorage(root))
    with mock.patch.object(cleanup, "_SETTLE_S", 0.0):
        sweeper.find_orphans_soon(lambda iteration: iteration == 7)
    sweeper.sweep()
    assert planted.exists(), "both looks of the resume leave out a pending save"
    for committed in (6, 7):  # 7 becomes the second-newest commit
        sweeper.find_orphans(lambda iteration: False, committed)
    sweeper.sweep()
    assert planted.exists()
    sweeper.find_orphans(lambda iteration: False, 8)
    manifest = planted.with_name(file_names.MANIFEST)
    manifest.touch()  # the commit happens at the last moment
    sweeper.sweep()
    assert planted.exists()
    manifest.unlink()
    sweeper.find_orphans(lambda iteration: iteration == 7, 9)
    sweeper.sweep()
    assert planted.exists(), "an iteration that is being saved again"
    sweeper.find_orphans(lambda iteration: False, 10)
    sweeper.sweep()
    assert not planted.parent.exists()


@pytest.mark.parametrize("killed", ["persist.chunk:1", "put.written:1", "put.written:3"])
def test_a_killed_agents_files_are_gone_once_its_successor_has_committed(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, killed: str
) -> None:
    once = tmp_path / "reached"
    monkeypatch.setenv("FLASHCKPT_FAULT", f"agent:{killed}:KILL:{once}")
    first = node.trainer(root)
    agent = first.client.agent_pid
    with contextlib.suppress(AgentError):  # the agent may die before it answers
        first.stage(10, new_save_id())
    eventually("the end of the agent", lambda: not is_alive(agent))
    first.hang_up()
    assert len(listing(root)) > 1
    trainer = node.trainer(root)
    assert [trainer.save(iteration).error for iteration in (20, 30)] == [None, None]
    expected = {"iter_0000020", "iter_0000030", file_names.TRACKER, file_names.HISTORY}
    eventually(
        "the removal of orphaned files",
        lambda: {name.split("/")[0] for name in listing(root)} == expected,
    )
    os.kill(trainer.client.agent_pid, signal.SIGKILL)
    assert_intact(root, 30, [trainer])
