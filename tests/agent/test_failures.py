"""Saves that cannot be made durable: the error of each rank, and the files that are left."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from megatron_flashckpt.file_format import file_names
from tests.agent.conftest import Node
from tests.support.histories import saves_in
from tests.support.stored import assert_intact, files_of_ours, read_rank, stored
from tests.support.trainer import (
    FakeTrainer,
    blocked_shard,
    config_of,
    content,
    eventually,
    new_save_id,
    save_all,
)


def test_ranks_that_fail_in_turn_agree_on_the_first_failure(node: Node, root: Path) -> None:
    """The first failed rank reports for its node, so later outcomes must name that rank."""
    trainers = [node.trainer(root, rank, 3) for rank in range(3)]
    save_id, later = new_save_id(), new_save_id()
    for rank in (0, 2):  # that of rank 1 fails only because the first one has failed
        obstruct(root, 5, rank, save_id)
    failed_ranks = []
    for trainer in trainers:
        trainer.stage(5, save_id)
        failed_ranks.append(trainer.outcome().failed_ranks)
    assert failed_ranks[0] == (0,)
    assert failed_ranks[1][:1] == failed_ranks[2][:1] == (0,)
    obstruct(root, 6, 2, later)
    trainers[2].stage(6, later)
    assert trainers[2].outcome().failed_ranks == (2,)


def obstruct(root: Path, iteration: int, rank: int, save_id: str) -> Path:
    """Keep a shard of a save from being written; its end can be written."""
    obstacle = root / file_names.iteration_dir(iteration) / file_names.shard_name(rank, save_id)
    obstacle.mkdir(parents=True)
    return obstacle


def test_a_save_on_a_full_disk_fails_and_frees_its_space(small_disk: Path, node: Node) -> None:
    root = small_disk / "save"
    # The shard of rank 1 fits. It must be removed when the shard of rank 0 does not fit.
    trainers = [
        node.trainer(root, 0, 2, numel=40_000),
        node.trainer(root, 1, 2, key="head.weight", numel=100),
    ]
    assert save_all(trainers, 1) == [None, None]
    # Trainers hear of a save before it is in the history.
    eventually("the history of the first save", lambda: saves_in(root))
    ballast = small_disk / "ballast"
    free = _free_nbytes(small_disk)
    ballast.write_bytes(bytes(free - 100_000))
    before, free = files_of_ours(root), _free_nbytes(small_disk)
    for error in save_all(trainers, 2):
        assert error is not None
        assert str(root / file_names.iteration_dir(2)) in error
        assert "No space left" in error
        assert "free space there or save elsewhere" in error
    # A rank may still be writing when the save fails; its file is removed after that write.
    pages = 2 * 4096  # for the end of the failed save, and for its event in the history
    eventually(
        "the removal of the failed attempt",
        lambda: files_of_ours(root) == before and _free_nbytes(small_disk) >= free - pages,
    )
    assert_intact(root, 1, trainers)
    ballast.unlink()
    assert save_all(trainers, 2) == [None, None]
    assert_intact(root, 2, trainers)


def test_a_shard_under_way_is_removed_after_its_save_has_failed(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    save_id = new_save_id()
    with blocked_shard(root, 1, 1, save_id) as unblock:
        trainers[1].stage(1, save_id)
        obstacle = obstruct(root, 1, 0, save_id)
        trainers[0].stage(1, save_id)
        unblock()
        errors = [trainer.outcome().error for trainer in trainers]
        assert errors[0] is not None
        assert errors == [errors[0]] * 2
    obstacle.rmdir()
    eventually("the removal of the files of the other rank", lambda: files_of_ours(root) == [])
    assert save_all(trainers, 1) == [None, None]


@pytest.mark.parametrize("first", ["the rank that cannot", "the rank that waits"])
def test_a_rank_that_cannot_stage_cancels_the_save_on_all_ranks(
    node: Node, other_node: Node, root: Path, first: str
) -> None:
    here = [node.trainer(root, rank, 3) for rank in (0, 1)]
    there = other_node.trainer(root, 2, 3)
    waiting = [here[0], there]
    run = here[0].open_run()
    for trainer in (here[1], there):
        trainer.join(run)
    save_id = here[0].new_save_id()
    if first == "the rank that cannot":
        here[1].call_off(1, save_id, "no memory for it")
    for trainer in waiting:
        trainer.stage(1, save_id)
    if first == "the rank that waits":
        for trainer in waiting:
            eventually("the part of the rank is in storage", lambda t=trainer: _is_persisted(t))
        assert there.client.poll().pending == 1
        here[1].call_off(1, save_id, "no memory for it")
    for trainer in waiting:
        outcome = trainer.outcome()
        assert (outcome.iteration, outcome.save_id) == (1, save_id)
        assert outcome.error == "rank 1: no memory for it"
    assert here[1].client.poll().finished == (), "the rank that failed gets no second result"
    eventually("the removal of the failed attempt", lambda: files_of_ours(root) == [])
    assert save_all([*here, there], 2) == [None] * 3
    assert_intact(root, 2, [*here, there])


def _is_persisted(trainer: FakeTrainer) -> bool:
    return any(offer.digests is not None for offer in trainer.take())


def test_a_tracker_that_cannot_move_is_reported_and_spares_the_checkpoint(
    node: Node, root: Path
) -> None:
    """The end decides; loads of this package find the checkpoint without the tracker."""
    trainer = node.trainer(root)
    (root / file_names.TRACKER / "something").mkdir(parents=True)
    trainer.stage(1, new_save_id())
    (notice,) = eventually("a notice", lambda: trainer.client.poll(0.5).notices)
    assert str(root / file_names.TRACKER) in notice.text
    assert read_rank(stored(root, 1), trainer) == content(0, 1, trainer.layout.nbytes)
    (root / file_names.TRACKER / "something").rmdir()
    (root / file_names.TRACKER).rmdir()
    assert save_all([trainer], 2) == [None]
    assert_intact(root, 2, [trainer])


def _free_nbytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_bsize


def test_the_first_slow_rank_gets_the_warning_for_its_node(node: Node, root: Path) -> None:
    """Rank 0 runs on another node, where its own agent reports the slow save."""
    config = config_of(node.runtime_dir, slow_save_s=0.2)
    trainers = [node.trainer(root, rank, 3, config=config) for rank in (1, 2)]
    save_id = new_save_id()
    with contextlib.ExitStack() as held:
        for trainer in trainers:
            held.enter_context(blocked_shard(root, 1, trainer.rank, save_id))
            trainer.stage(1, save_id)
        (notice,) = eventually("a notice", lambda: trainers[0].client.poll(0.5).notices)
        assert "still being written" in notice.text
        assert trainers[1].client.poll(0.0).notices == ()
