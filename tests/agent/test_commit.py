"""Commits: what they leave in storage, what ranks hear of them, and what the tracker names."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flashckpt.agent import committer
from megatron_flashckpt.catalog import listing
from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.lineage import Save, choose
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.config import Retention
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.stored import (
    assert_intact,
    files_of_ours,
    names_in,
    read_rank,
    stored,
    tracked,
)
from tests.support.trainer import (
    FakeTrainer,
    blocked_shard,
    content,
    copy_tree,
    eventually,
    is_alive,
    new_save_id,
    remove_tree,
    run_after,
)


def test_a_commit_writes_shards_manifest_common_state_and_tracker(node: Node, root: Path) -> None:
    """One of the ranks has no pieces."""
    trainers = [node.trainer(root, rank, 4, numel=1000 * (rank < 3)) for rank in range(4)]
    run = trainers[0].open_run()
    for trainer in trainers[1:]:
        trainer.join(run)
    save_id = trainers[0].new_save_id()
    data = [trainer.stage(7, save_id) for trainer in trainers]
    for trainer in trainers:
        outcome = trainer.outcome()
        assert (outcome.iteration, outcome.save_id, outcome.error) == (7, save_id, None)
        assert outcome.seconds > 0
        assert trainer.client.poll().pending == 0
    eventually("the removal of commit records", lambda: not list(root.rglob("*.record")))
    shards = {file_names.shard_name(rank, save_id) for rank in range(4)}
    assert {p.name for p in (root / "iter_0000007").iterdir()} == shards | {
        file_names.end_name(save_id),
        file_names.common_name(save_id),
    }
    assert data[3] == b""
    assert_intact(root, 7, trainers)
    assert {p.name for p in root.iterdir()} == {
        "iter_0000007",
        file_names.TRACKER,
        file_names.OWN,
    }
    common = root / "iter_0000007" / file_names.common_name(save_id)
    assert common.read_bytes() == f"common of 7 by {save_id}".encode()


def test_an_older_save_of_an_iteration_that_ends_last_does_not_replace_the_newer_one(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    older, newer = new_save_id(), new_save_id()
    with blocked_shard(root, 5, 0, older) as unblock:
        trainer.stage(5, older)
        trainer.stage(5, newer)
        assert trainer.outcome().save_id == newer
        unblock()
        outcome = trainer.outcome()
    assert (outcome.save_id, outcome.error) == (older, None)
    assert stored(root, 5).manifest.save_id == newer
    assert_intact(root, 5, [trainer])


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


def test_what_an_overtaken_agent_commits_counts_for_no_load_though_it_checks_nothing(
    node: Node, other_node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves even the tracker. The newer run resumed before that save, and has saved nothing."""
    monkeypatch.setattr(committer, "later_run", lambda *_: None)
    with agent_here(node, root):
        first = node.trainer(root)
        run = first.open_run()
        resumed, late = Save(1, first.new_save_id()), Save(4, first.new_save_id())
        assert first.save(*resumed).error is None
        with blocked_shard(root, 4, 0, late.save_id) as unblock:
            first.stage(*late)
            later = other_node.trainer(root, retention=Retention(latest=2))
            later.open_run(resumed, run.ancestors, policy="take_over")
            unblock()
            assert first.outcome().error is None
    facts = read_facts(PosixStore(root))
    assert (set(facts.stored), facts.tracker) == ({resumed, late}, 4)
    assert [candidate.save for candidate in choose(facts).candidates] == [resumed]
    assert later.save(5).error is None
    assert_intact(root, 5, [later])
    eventually("the other save goes", lambda: late.save_id not in str(files_of_ours(root)))
    assert listing.committed_iterations(PosixStore(root)) == [1, 5]


def test_a_restarted_rank_gets_no_results_from_its_former_process(node: Node, root: Path) -> None:
    """Otherwise the save that the crash cut short would stop the job after a successful restart."""
    config = node.config(commit_timeout_s=1.0)
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    trainers[0].stage(1, new_save_id())
    for trainer in trainers:
        trainer.hang_up()
    again: list[FakeTrainer] = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    results = [again[0].client.poll(0.5)]
    eventually(
        "no pending save",
        lambda: results.append(again[0].client.poll(0.5)) or not results[-1].pending,
    )
    assert all(result.finished == () for result in results)
    eventually("the end of the save that was cut short", lambda: files_of_ours(root) == [])
    save_id = new_save_id()
    for trainer in again:
        trainer.stage(1, save_id)
    assert [trainer.outcome().save_id for trainer in again] == [save_id] * 2
    assert is_alive(again[0].client.agent_pid)


def saves_of(names: list[str], suffix: str) -> set[str | None]:
    return {file_names.save_of(Path(name).name) for name in names if name.endswith(suffix)}


def copy_as_listed(source: Path, copy: Path) -> None:
    """Copy as rsync does: by name, from a list that is made before the first file is read.

    The list has the shard of a save whose end is not there yet, and the tracker moves on.
    """

    def list_in_mid_save() -> list[str] | None:
        names = names_in(source)
        return names if saves_of(names, ".safetensors") - saves_of(names, ".end") else None

    names = eventually("a save without an end", list_in_mid_save)
    last = tracked(source)
    eventually("two more commits", lambda: int(tracked(source)) > int(last) + 1)
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(source / name, copy / name)


@pytest.mark.parametrize("copied", [copy_tree, copy_as_listed], ids=["cp", "rsync"])
def test_a_job_resumes_in_a_copy_taken_during_saves_from_its_newest_whole_checkpoint(
    node: Node, root: Path, tmp_path: Path, copied: Callable[[Path, Path], None]
) -> None:
    copy, alone = tmp_path / "copy", tmp_path / "alone"
    trainer = node.trainer(root, numel=2**18)
    run = trainer.open_run()
    assert trainer.save(1).error is None
    stop = threading.Event()

    def train() -> None:
        iteration = 1
        while not stop.is_set():
            iteration += 1
            assert trainer.save(iteration).error is None

    training = threading.Thread(target=train)
    training.start()
    try:
        eventually(
            "the commit of iteration 3",
            lambda: list((root / file_names.iteration_dir(3)).glob("*.end")),
        )
        copied(root, copy)
    finally:
        stop.set()
        training.join()
    iterations = listing.committed_iterations(PosixStore(copy))
    assert iterations[:2] == [1, 2]
    for iteration in iterations:
        checkpoint = stored(copy, iteration)
        assert verify(checkpoint) == []
        expected = content(0, iteration, trainer.layout.nbytes)
        assert read_rank(checkpoint, trainer) == expected
    newest = file_names.iteration_dir(iterations[-1])
    shutil.copytree(copy / newest, alone / newest)
    # A tracker that was copied before its twin looks as if a person had set it back.
    best = choose(read_facts(PosixStore(copy))).candidates[0].save
    assert best.iteration in (iterations[-1], int(tracked(copy)))
    assert choose(read_facts(PosixStore(alone))).candidates[0].save.iteration == iterations[-1]
    remove_tree(copy / file_names.OWN)
    best = choose(read_facts(PosixStore(copy))).candidates[0].save
    assert best.iteration == min(iterations[-1], int(tracked(copy)))

    again = node.trainer(copy, numel=2**18)
    again.open_run(best, run.ancestors)
    for iteration in (100, 101):
        assert again.save(iteration).error is None
    assert_intact(copy, 101, [again])
    whole = {stored(copy, iteration).manifest.save_id for iteration in (*iterations, 100, 101)}
    eventually(
        "the end of what was copied in half",
        lambda: saves_of(files_of_ours(copy), ".safetensors") == whole,
    )
