"""The commit: the moment from which a checkpoint exists, and the order of the steps around it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from megatron_flashckpt.catalog.directory import committed_saves
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact, files_of_ours
from tests.agent.test_shard_writer import read_rank, stored
from tests.support.agents import agent_here
from tests.support.trainer import (
    FakeTrainer,
    blocked_open,
    content,
    eventually,
    is_alive,
    new_save_id,
    run_after,
)


def iterations_in(root: Path) -> list[int]:
    iterations = [file_names.parse_iteration_dir(path.name) for path in root.iterdir()]
    return sorted(iteration for iteration in iterations if iteration is not None)


# ---------------------------------------------------------------------- all ranks


def test_a_save_is_not_committed_before_the_record_of_the_last_rank(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 3) for rank in range(3)]
    save_id = new_save_id()
    directory = root / file_names.iteration_dir(1)
    for trainer in trainers[:2]:
        trainer.stage(1, save_id)
        own = range(trainer.rank, trainer.rank + 1)
        eventually("the record", (directory / file_names.record_name(own, save_id)).exists)
    for trainer in trainers[:2]:
        results = trainer.client.poll(0.2)
        assert (results.finished, results.pending) == ((), 1)
    assert committed_saves(PosixStore(root)) == []
    assert not (root / file_names.TRACKER).exists()
    trainers[2].stage(1, save_id)
    assert [trainer.outcome().error for trainer in trainers] == [None] * 3
    assert_intact(root, 1, trainers)


@pytest.mark.parametrize(
    ("ranks", "missing"),
    [((0, 2), "the commit records of 2 of 4 ranks (1, 3)"), ((1,), "its end, from the node of")],
    ids=["with rank 0", "without rank 0"],
)
def test_a_save_that_times_out_names_what_is_missing_and_leaves_no_file(
    node: Node, root: Path, ranks: tuple[int, ...], missing: str
) -> None:
    config = node.config(commit_timeout_s=1.0)
    trainers = [node.trainer(root, rank, 4, config=config) for rank in ranks]
    save_id = new_save_id()
    for trainer in trainers:
        trainer.stage(1, save_id)
    for trainer in trainers:
        outcome = trainer.outcome()
        assert outcome.seconds >= 1.0
        assert outcome.error is not None
        assert str(root / file_names.iteration_dir(1)) in outcome.error
        assert missing in outcome.error
        assert "agent.commit_timeout_s" in outcome.error
    assert files_of_ours(root) == []


# ---------------------------------------------------------------------- the same iteration again


def test_a_repeated_save_counts_from_its_commit_on(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    first, second = new_save_id(), new_save_id()
    for trainer in trainers:
        trainer.stage(5, first)
    assert [trainer.outcome().error for trainer in trainers] == [None, None]
    directory = root / file_names.iteration_dir(5)
    with blocked_open(directory / file_names.shard_name(1, second)) as unblock:
        for trainer in trainers:
            trainer.stage(5, second)
        eventually("the shard of rank 0", (directory / file_names.shard_name(0, second)).exists)
        assert stored(root, 5).manifest.save_id == first
        unblock()
        assert [trainer.outcome().error for trainer in trainers] == [None, None]
    assert stored(root, 5).manifest.save_id == second
    assert_intact(root, 5, trainers)


def test_a_failed_attempt_leaves_the_committed_one_of_its_iteration(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    first, second = new_save_id(), new_save_id()
    assert trainer.save(5, first).error is None
    (root / file_names.iteration_dir(5) / file_names.shard_name(0, second)).mkdir()
    assert trainer.save(5, second).error is not None
    assert stored(root, 5).manifest.save_id == first
    assert_intact(root, 5, [trainer])


@pytest.mark.parametrize("later", [5, 20])
def test_an_older_save_that_ends_last_does_not_replace_the_newer_one(
    node: Node, root: Path, later: int
) -> None:
    trainer = node.trainer(root)
    older, newer = new_save_id(), new_save_id()
    with blocked_open(
        root / file_names.iteration_dir(5) / file_names.shard_name(0, older)
    ) as unblock:
        trainer.stage(5, older)
        trainer.stage(later, newer)
        assert trainer.outcome().save_id == newer
        unblock()
        outcome = trainer.outcome()
    assert (outcome.save_id, outcome.error) == (older, None)
    assert stored(root, later).manifest.save_id == newer
    assert_intact(root, later, [trainer])
    if later > 5:
        assert read_rank(stored(root, 5), trainer) == content(0, 5, trainer.layout.nbytes)


def test_training_that_resumes_from_an_older_checkpoint_moves_the_tracker_back(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    saves = {iteration: new_save_id() for iteration in (10, 20)}
    for iteration, save_id in saves.items():
        assert trainer.save(iteration, save_id).error is None
    trainer.hang_up()
    again = node.trainer(root)
    again.join(run_after(saves[10], 10))
    assert again.save(15).error is None
    assert_intact(root, 15, [again])


# ---------------------------------------------------------------------- the order of steps


class NotingStore(PosixStore):
    """A real store that notes the small objects it writes, and refuses one kind of them."""

    refused = ""
    steps: ClassVar[list[str]] = []

    def _note(self, name: str) -> None:
        kind = name.rpartition(".")[2] if name.startswith("iter_") else name
        self.steps.append(kind)
        if kind == self.refused:
            raise StorageError(errno.ENOSPC, f"{name}: cannot write (No space left on device)")

    def put(self, name: str, data: bytes) -> None:
        self._note(name)
        super().put(name, data)

    def create(self, name: str, data: bytes) -> None:
        self._note(name)
        super().create(name, data)


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[NotingStore]]:
    monkeypatch.setattr("megatron_flashckpt.agent.state.open_store", NotingStore)
    monkeypatch.setattr(NotingStore, "steps", [])
    yield NotingStore
    NotingStore.refused = ""


#: What a commit writes after the shards, in order.
STEPS = ["record", "msgpack", "end", file_names.TRACKER, file_names.TRACKED]


def test_a_commit_writes_records_then_its_end_then_the_tracker(
    node: Node, root: Path, noting: type[NotingStore]
) -> None:
    with agent_here(node, root):
        assert node.trainer(root).save(5).error is None
    assert [step for step in noting.steps if step in STEPS] == STEPS


@pytest.mark.parametrize("refused", STEPS)
@pytest.mark.usefixtures("impatient")
def test_a_commit_that_fails_midway_leaves_the_former_checkpoint_or_the_new_one(
    node: Node, root: Path, noting: type[NotingStore], refused: str
) -> None:
    is_committed = STEPS.index(refused) > STEPS.index("end")
    with agent_here(node, root):
        trainer = node.trainer(root)
        assert trainer.save(5).error is None
        noting.refused = refused
        error = trainer.save(6).error
        assert (error is None) is is_committed
        newest = max(save.iteration for save in committed_saves(PosixStore(root)))
        assert newest == (6 if is_committed else 5)
        assert read_rank(stored(root, newest), trainer) == content(0, newest, trainer.layout.nbytes)
        has_moved = STEPS.index(refused) > STEPS.index(file_names.TRACKER)
        assert (root / file_names.TRACKER).read_text() == ("6" if has_moved else "5")
        noting.refused = ""
        assert trainer.save(7).error is None
        assert_intact(root, 7, [trainer])


# ---------------------------------------------------------------------- after a restart


def test_a_restarted_rank_gets_no_results_from_its_former_process(node: Node, root: Path) -> None:
    """Otherwise the save that the crash cut short would stop the job after a successful restart."""
    config = node.config(commit_timeout_s=1.0)
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    trainers[0].stage(1, new_save_id())
    for trainer in trainers:
        trainer.hang_up()
    again: list[FakeTrainer] = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    results = again[0].client.poll(1.5)
    assert (results.finished, results.pending) == ((), 0)
    eventually("the end of the save that was cut short", lambda: files_of_ours(root) == [])
    save_id = new_save_id()
    for trainer in again:
        trainer.stage(1, save_id)
    assert [trainer.outcome().save_id for trainer in again] == [save_id] * 2
    assert is_alive(again[0].client.agent_pid)


def test_a_resume_gives_up_a_save_that_a_crash_cut_short(node: Node, root: Path) -> None:
    """The slot is emptied and the shards are removed at once, not after the commit timeout."""
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    kept, cut_short = new_save_id(), new_save_id()
    for trainer in trainers:
        trainer.stage(1, kept)
    assert [trainer.outcome().error for trainer in trainers] == [None, None]
    trainers[0].stage(2, cut_short)
    for trainer in trainers:
        trainer.hang_up()
    again: list[FakeTrainer] = [node.trainer(root, rank, 2) for rank in range(2)]
    run = run_after(kept, 1)
    for trainer in again:
        trainer.join(run)
    shard = root / file_names.iteration_dir(2) / file_names.shard_name(0, cut_short)
    eventually("the removal of its shard", lambda: not shard.exists())

    def offered() -> list[str]:
        slab, offers = again[0].client.take()
        if slab is not None:
            slab.close()
        return [offer.save_id for offer in offers]

    eventually("the slot of the abandoned save is emptied", lambda: offered() == [kept])
    assert (root / file_names.TRACKER).read_text() == "1"
