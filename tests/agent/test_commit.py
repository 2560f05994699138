"""The commit: what ranks hear of it, and what the tracker names after it."""

from __future__ import annotations

from pathlib import Path

from megatron_flashckpt.file_format import file_names
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact, files_of_ours
from tests.agent.test_shard_writer import stored
from tests.support.trainer import (
    FakeTrainer,
    blocked_shard,
    eventually,
    is_alive,
    new_save_id,
    run_after,
)


def iterations_in(root: Path) -> list[int]:
    iterations = [file_names.parse_iteration_dir(path.name) for path in root.iterdir()]
    return sorted(iteration for iteration in iterations if iteration is not None)


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
