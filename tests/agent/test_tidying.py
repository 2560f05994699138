"""Removal of obsolete files after a commit: it follows the report and delays no save."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.agent import commit_thread as committer_module
from megatron_flashckpt.agent.claim import RunKey
from megatron_flashckpt.agent.commit import commit, outcome_of
from megatron_flashckpt.agent.fence import Fence
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.agent.tidying import CommittedSave, Tidier, tidy
from megatron_flashckpt.catalog import retention as retention_module
from megatron_flashckpt.catalog.manifest_facts import KnownManifests
from megatron_flashckpt.catalog.retention import finish, retire, survey
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.config import Retention
from megatron_flashckpt.file_format import file_names, manifest
from megatron_flashckpt.memory.slot import SlotMeta
from megatron_flashckpt.storage.parallel import for_all
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_commit import iterations_in
from tests.agent.test_failures import assert_intact
from tests.agent.test_faulty_storage import agent_here
from tests.agent.test_shard_writer import stored
from tests.support.persisting import persisted
from tests.support.trainer import (
    PATIENCE_S,
    FakeTrainer,
    blocked_open,
    eventually,
    new_save_id,
)

A, B = "a" * 12, "b" * 12
DIRECTORY = file_names.iteration_dir(5)


class GatedStorage(PosixStorage):
    """Real storage whose deletes wait until a gate opens."""

    opened = threading.Event()

    def delete(self, name: str) -> None:
        if name.endswith((".commit", ".safetensors")):
            self.opened.wait(PATIENCE_S)
        super().delete(name)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr("megatron_flashckpt.agent.state.open_storage", GatedStorage)
    GatedStorage.opened.clear()
    yield GatedStorage.opened
    GatedStorage.opened.set()


def test_results_are_reported_and_slots_freed_before_files_are_deleted(
    node: Node, root: Path, gate: threading.Event
) -> None:
    with agent_here(node, root):
        trainer = node.trainer(root, retention=Retention(latest=1))
        for iteration in (1, 2, 3, 4):  # more saves than slots
            assert trainer.save(iteration).error is None
        assert iterations_in(root) == [1, 2, 3, 4]
        assert len(list(root.rglob("*.commit"))) == 4
        gate.set()
        eventually("the removal of commit records", lambda: iterations_in(root) == [4])
        eventually("the end of records", lambda: not list(root.rglob("*.commit")))
        assert_intact(root, 4, [trainer])


def test_an_agent_tidies_before_it_ends(node: Node, root: Path, gate: threading.Event) -> None:
    with agent_here(node, root):
        trainer = node.trainer(root, retention=Retention(latest=1))
        for iteration in (1, 2):
            assert trainer.save(iteration).error is None
        trainer.hang_up(leave=True)
        threading.Timer(0.3, gate.set).start()
    assert iterations_in(root) == [2]
    assert not list(root.rglob("*.commit"))


def test_an_agent_ends_even_if_a_removal_hangs(
    node: Node, root: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer_module, "_TIDY_S", 0.2)
    with agent_here(node, root):  # this context asserts the end of the agent
        trainer = node.trainer(root)
        assert trainer.save(1).error is None
        trainer.hang_up(leave=True)
    assert not gate.is_set()
    assert len(list(root.rglob("*.commit"))) == 1, "the next agent removes this record"


def test_the_next_commit_tidies_after_a_killed_agent(node: Node, root: Path) -> None:
    assert node.trainer(root).save(1).error is None
    eventually("the removal of commit records", lambda: not list(root.rglob("*.commit")))
    for pid in node.agents():
        os.kill(pid, 9)
    save_id = stored(root, 1).manifest.save_id
    record = root / file_names.iteration_dir(1) / file_names.record_name(0, save_id)
    record.touch()
    assert node.trainer(root).save(2).error is None
    eventually("the removal of the record", lambda: not record.exists())
    assert verify(stored(root, 1)) == []


def test_saves_that_wait_for_removals_release_their_commit_data(
    node: Node, root: Path, gate: threading.Event
) -> None:
    """Before, each save kept its template and its common state until storage answered."""
    with agent_here(node, root):
        trainer = node.trainer(root, retention=Retention(latest=1))
        for iteration in range(1, 51):
            outcome = trainer.save(iteration)
            assert (outcome.iteration, outcome.error) == (iteration, None)
        assert len(list(root.rglob("*.commit"))) == 50, "no record was removed so far"
        gc.collect()
        kept = collections.Counter(type(item) for item in gc.get_objects())
        # The commit thread may still hold one save; the slots describe two.
        assert kept[PendingSave] <= 2
        assert kept[SlotMeta] <= 6
        assert len(_waiting()) == 50
        assert len({id(item.manifests) for item in _waiting()}) == 1, (
            "all saves share the cache of the agent"
        )
        gate.set()
        eventually(
            "the removal of commit records", lambda: iterations_in(root) == [50], within_s=60.0
        )
        eventually("the end of records", lambda: not list(root.rglob("*.commit")))
        assert_intact(root, 50, [trainer])
        eventually("the end of waiting saves", lambda: len(_waiting()) <= 1)  # the last


def _waiting() -> list[CommittedSave]:
    gc.collect()
    return [item for item in gc.get_objects() if type(item) is CommittedSave]


# ---------------------------------------------------------------------- files that stay


def test_a_save_under_way_of_the_same_iteration_is_spared(root: Path) -> None:
    storage = PosixStorage(root)
    former, later = persisted(storage, A), persisted(storage, B)
    commit(former)
    tidy(CommittedSave.of(former), lambda: {B})
    commit(later)
    assert verify(stored(root, 5)) == []
    assert stored(root, 5).manifest.save_id == B


def test_tidying_after_a_restart_spares_new_saves_of_other_nodes(root: Path) -> None:
    """The job resumed from an older checkpoint, and this node still has to save the iteration."""
    storage, fence = PosixStorage(root), Fence()
    former, run = persisted(storage, A), RunKey(1, "run")
    fence.hold(run, has_rank_0=True)
    former.fence, former.run = fence, run
    commit(former)
    fence.hold(RunKey(2, "run"), has_rank_0=True)
    elsewhere = persisted(storage, B, 1, 2)
    tidy(CommittedSave.of(former))
    left = set(os.listdir(root / DIRECTORY))
    assert {file_names.shard_name(1, B), file_names.record_name(1, B)} <= left
    assert file_names.record_name(0, A) not in left
    assert outcome_of(elsewhere, 60.0) == (False, None)


def test_tidying_spares_saves_of_other_nodes_after_a_resume(
    node: Node, other_node: Node, root: Path
) -> None:
    """A node may stage its part of the next save before the previous save is committed."""
    first, second = node.trainer(root, 0, 2), other_node.trainer(root, 1, 2)
    ids = {iteration: new_save_id() for iteration in (10, 20, 11, 12)}
    for iteration in (10, 20):
        for trainer in (second, first):
            trainer.stage(iteration, ids[iteration])
        assert [rank.outcome().error for rank in (first, second)] == [None, None]
    for trainer in (second, first):
        trainer.client.resume_from(ids[10], 10)
    orphan = root / file_names.iteration_dir(5) / file_names.shard_name(0, A)
    orphan.parent.mkdir()
    orphan.touch()
    for iteration in (11, 12):
        second.stage(iteration, ids[iteration])
    record = root / file_names.iteration_dir(12) / file_names.record_name(1, ids[12])
    eventually("a record of the next save", record.exists)
    first.stage(11, ids[11])
    eventually("the search for older saves", lambda: not orphan.exists())
    assert record.exists()
    first.stage(12, ids[12])
    assert [first.outcome().error for _ in range(2)] == [None, None]
    assert [second.outcome().error for _ in range(2)] == [None, None]
    assert_intact(root, 12, [first, second])


def test_late_tidying_spares_a_later_commit_of_the_same_iteration(root: Path) -> None:
    storage = PosixStorage(root)
    former, later = persisted(storage, A), persisted(storage, B)
    commit(former)
    commit(later)
    tidy(CommittedSave.of(former))
    assert stored(root, 5).manifest.save_id == B
    assert verify(stored(root, 5)) == []
    tidy(CommittedSave.of(later))
    assert set(os.listdir(root / DIRECTORY)) == {
        file_names.MANIFEST,
        file_names.common_name(B),
        file_names.shard_name(0, B),
    }


def test_no_removal_is_chosen_while_a_commit_puts_its_files(
    root: Path,
) -> None:
    """A checkpoint that the tracker is about to name, or a temporary file, must not be removed."""
    storage = PosixStorage(root)
    save = persisted(storage, A)
    commit(save)
    record = root / DIRECTORY / file_names.record_name(0, A)
    with save.manifests.changing:
        tidying = threading.Thread(target=tidy, args=(CommittedSave.of(save),))
        tidying.start()
        tidying.join(0.2)
        assert record.exists()
    tidying.join(PATIENCE_S)
    assert not record.exists()


def test_files_that_nfs_keeps_for_a_reader_stay_and_are_named_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    storage = PosixStorage(root)
    commit(persisted(storage, A))
    (root / DIRECTORY / file_names.MANIFEST).rename(root / file_names.removal_name(5, A))
    (root / file_names.TRACKER).unlink()
    open_elsewhere = root / DIRECTORY / ".nfs000000000012ab3400000001"
    open_elsewhere.touch()
    for _ in range(3):
        finish(storage)
    assert os.listdir(root / DIRECTORY) == [open_elsewhere.name]
    assert caplog.text.count(open_elsewhere.name) == 1
    assert "not ours" not in caplog.text
    open_elsewhere.unlink()
    finish(storage)
    assert not (root / DIRECTORY).exists()
    assert not (root / file_names.removal_name(5, A)).exists()
    retention_module._told_open.clear()


@contextlib.contextmanager
def restarted(node: Node, root: Path, retention: Retention) -> Iterator[FakeTrainer]:
    """Yield a rank of a job that has started again; save 2 of its former run is committed later.

    The former run has saved iterations 1 and 2, and its rule keeps one checkpoint.
    """
    first = node.trainer(root, retention=Retention(latest=1))
    first.claim()
    assert first.save(1).error is None
    save_id = new_save_id()
    with blocked_open(root / file_names.iteration_dir(2) / file_names.shard_name(0, save_id)):
        first.stage(2, save_id)
        first.hang_up()
        second = node.trainer(root, retention=retention)
        second.claim()
        yield second


@pytest.mark.parametrize("resumed", [1, 2])
def test_no_checkpoint_is_removed_while_a_restarted_job_loads(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch, resumed: int
) -> None:
    """The agent commits a save of the former run, and its rule keeps one checkpoint only."""
    added: list[object] = []
    with agent_here(node, root) as agent:
        tidier = agent._committer._tidier
        with restarted(node, root, Retention(latest=1)) as second:
            _await_tidied(tidier)
            add = tidier.add
            monkeypatch.setattr(tidier, "add", lambda work: (add(work), added.append(work)))
        eventually("the removals after the commit", lambda: added)
        _await_tidied(tidier)
        assert iterations_in(root) == [1, 2]
        assert (root / file_names.TRACKER).read_text() == "2"
        assert verify(stored(root, 1)) == []
        second.client.resume_from(stored(root, resumed).manifest.save_id, resumed)
        _await_tidied(tidier)
        assert iterations_in(root) == list(range(resumed, 3))
        assert second.save(3).error is None
        eventually("the removal of both", lambda: iterations_in(root) == [3])


def test_the_rules_of_a_new_run_decide_what_a_former_run_left(node: Node, root: Path) -> None:
    """The job resumes from an older checkpoint, and its rules keep more than before."""
    with agent_here(node, root) as agent:
        tidier = agent._committer._tidier
        with restarted(node, root, Retention(latest=9)) as second:
            pass
        eventually("the commit", lambda: (root / file_names.TRACKER).read_text() == "2")
        second.client.resume_from(stored(root, 1).manifest.save_id, 1)
        assert second.save(3).error is None
        eventually("the end of records", lambda: not list(root.rglob("*.commit")))
        _await_tidied(tidier)
        assert iterations_in(root) == [1, 2, 3]


def test_a_removal_ends_when_another_job_starts(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage may hang in a removal until the job has been started again."""
    ended, second = threading.Event(), []

    def start(name: str) -> None:
        if name == "retain.chosen" and not second:
            assert ended.wait(PATIENCE_S)
            second.append(node.trainer(root, retention=Retention(latest=1)))
            second[0].claim()

    with agent_here(node, root) as agent:
        first = node.trainer(root)
        first.claim()
        for iteration in (1, 2):
            assert first.save(iteration).error is None
        first.retention = Retention(latest=1)
        monkeypatch.setattr(retention_module, "hit", start)
        assert first.save(3).error is None
        first.hang_up()
        ended.set()
        _await_tidied(agent._committer._tidier)
        assert len(iterations_in(root)) == 2
        second[0].client.resume_from(stored(root, 3).manifest.save_id, 3)
        eventually("the removal of the other one", lambda: iterations_in(root) == [3])


def test_removals_that_come_late_spare_the_checkpoint_a_job_has_resumed_from(
    node: Node, root: Path
) -> None:
    """The removals of two commits wait; only the earlier one is due after the resume."""
    held = threading.Event()
    with agent_here(node, root) as agent:
        tidier = agent._committer._tidier
        tidier.add(lambda: held.wait(PATIENCE_S))
        first = node.trainer(root, retention=Retention(latest=1))
        first.claim()
        for iteration in (1, 2):
            assert first.save(iteration).error is None
        first.hang_up()
        second = node.trainer(root, retention=Retention(latest=1))
        second.claim()
        held.set()
        _await_tidied(tidier)
        second.client.resume_from(stored(root, 1).manifest.save_id, 1)
        _await_tidied(tidier)
        assert iterations_in(root) == [1, 2]
        assert second.save(3).error is None
        eventually("the removal of both", lambda: iterations_in(root) == [3])


def _await_tidied(tidier: Tidier) -> None:
    """Wait for all removals that are queued now."""
    done = threading.Event()
    Tidier.add(tidier, done.set)
    assert done.wait(PATIENCE_S)


# ---------------------------------------------------------------------- costs of tidying


class SlowStorage(PosixStorage):
    """Storage with 5 ms per delete; counts simultaneous deletes and complete reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.most = self._now = self.read_manifests = 0
        self._lock = threading.Lock()

    def delete(self, name: str) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.005)
        super().delete(name)
        with self._lock:
            self._now -= 1

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        self.read_manifests += name.endswith(file_names.MANIFEST) and nbytes is None
        return super().read(name, offset, nbytes)


def test_several_files_are_deleted_at_a_time_on_slow_storage(root: Path) -> None:
    commit(persisted(PosixStorage(root), A))
    (root / DIRECTORY / file_names.MANIFEST).rename(root / file_names.removal_name(5, A))
    for rank in range(1, 64):
        (root / DIRECTORY / file_names.shard_name(rank, A)).touch()
    distant = SlowStorage(root)
    finish(distant)
    assert distant.most > 4
    assert not (root / DIRECTORY).exists()


def test_one_error_among_many_calls_is_raised_when_all_have_ended() -> None:
    done: list[int] = []

    def call(number: int) -> int:
        time.sleep(0.005)
        if number == 20:
            raise OSError("it")
        done.append(number)
        return number

    with pytest.raises(OSError, match="it"):
        for_all(call, range(64))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("storage")]


def test_retention_reads_a_manifest_again_only_if_it_was_replaced(root: Path) -> None:
    storage = SlowStorage(root)
    commit(persisted(PosixStorage(root), A))
    known = KnownManifests()
    for _ in range(3):
        (facts,), unreadable = survey(storage, [DIRECTORY], known)
        assert (facts.save_id, unreadable) == (A, {})
    assert storage.read_manifests == 1
    commit(persisted(PosixStorage(root), B))
    for _ in range(3):
        ((facts,), _) = survey(storage, [DIRECTORY], known)
        assert facts.save_id == B
    assert storage.read_manifests == 2
    (root / DIRECTORY / file_names.MANIFEST).write_bytes(b"{}")
    facts_left, unreadable = survey(storage, [DIRECTORY], known)
    assert (facts_left, list(unreadable)) == ([], [5])
    (root / DIRECTORY / file_names.MANIFEST).unlink()
    assert survey(storage, [DIRECTORY], known) == ([], {})


def test_an_agent_reads_each_manifest_of_a_kept_checkpoint_once(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, an agent read all of them after each commit."""
    decoded: list[str] = []
    decode = manifest.decode_facts

    def noting(encoded: bytes, place: str) -> manifest.CommitFacts:
        decoded.append(place)
        return decode(encoded, place)

    monkeypatch.setattr(manifest, "decode_facts", noting)
    with agent_here(node, root):
        trainer = node.trainer(root, retention=Retention(latest=9))
        for iteration in range(1, 7):
            assert trainer.save(iteration).error is None
        eventually("the removal of commit records", lambda: not list(root.rglob("*.commit")))
    assert len(decoded) == len(set(decoded)) == 6


def test_a_removal_works_without_a_manifest_cache(root: Path) -> None:
    """`flashckpt prune` calls the function in this way."""
    commit(persisted(PosixStorage(root), A))
    retire(PosixStorage(root), Retention(latest=1), retain_interval=None, tracked=9, previous=None)
    assert iterations_in(root) == [5]
