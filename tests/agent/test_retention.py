"""Retention through the agent: rules, metrics and saves over restarts. See also `test_janitor`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.config import Best, Retention
from megatron_flashckpt.file_format.file_names import save_name
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.stored import assert_intact, read_rank, stored
from tests.support.trainer import (
    FakeTrainer,
    blocked_shard,
    content,
    eventually,
    kill_agent,
    new_save_id,
)

LOSS = "lm loss validation"


def save_all(trainer: FakeTrainer, losses: dict[int, float | None]) -> None:
    for iteration, loss in losses.items():
        trainer.metrics = {} if loss is None else {LOSS: loss}
        outcome = trainer.save(iteration)
        assert outcome.error is None


def assert_these_are_left_whole(root: Path, trainer: FakeTrainer, iterations: list[int]) -> None:
    def left() -> list[int]:
        return [save.iteration for save in read_facts(PosixStore(root)).stored]

    eventually("the removal of the other checkpoints", lambda: left() == iterations)
    for iteration in iterations:
        expected = content(trainer.rank, iteration, trainer.layout.nbytes)
        assert read_rank(stored(root, iteration), trainer) == expected


def test_rules_hold_over_restarts_of_trainer_and_agent(node: Node, root: Path) -> None:
    """The best checkpoint was saved three agents ago, so only its manifest tells."""
    rules = Retention(latest=2, best=Best(metric=LOSS, keep=1))
    losses = {10: 5.0, 20: 1.0, 30: 4.0, 40: 3.0, 50: None, 60: 2.0}
    resumed, ancestors = None, ()
    for iteration, loss in losses.items():
        trainer = node.trainer(root, retention=rules)
        run = trainer.open_run(resumed, ancestors)
        save_all(trainer, {iteration: loss})
        resumed, ancestors = Save(iteration, save_name(run.name, 1)), run.ancestors
        trainer.hang_up()
        for pid in node.agents():
            kill_agent(pid)
    trainer = node.trainer(root, retention=rules)
    trainer.open_run(resumed, ancestors)
    save_all(trainer, {70: 9.0})
    assert_these_are_left_whole(root, trainer, [20, 60, 70])
    assert {n: stored(root, n).manifest.metrics for n in (20, 70)} == {
        20: {LOSS: 1.0},
        70: {LOSS: 9.0},
    }


def test_only_training_makes_checkpoints_older(node: Node, root: Path) -> None:
    """A pause between two runs looks like hosts whose clocks differ."""
    limit_s = 2.0
    rules = Retention(max_age_hours=limit_s / 3600)
    trainer = node.trainer(root, retention=rules)
    run = trainer.open_run()
    save_all(trainer, {10: None, 20: None})
    trainer.hang_up()
    time.sleep(limit_s)
    trainer = node.trainer(root, retention=rules)
    trainer.open_run(Save(20, save_name(run.name, 2)), run.ancestors)
    save_all(trainer, {30: None})
    eventually("the removal of commit records", lambda: not list(root.rglob("*.record")))
    assert_these_are_left_whole(root, trainer, [10, 20, 30])
    time.sleep(limit_s)
    save_all(trainer, {40: None})
    assert_these_are_left_whole(root, trainer, [40])


def test_a_clock_that_is_set_makes_no_checkpoint_older(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = time.time
    with agent_here(node, root):
        trainer = node.trainer(root, retention=Retention(max_age_hours=1.0))
        trainer.open_run()
        for iteration, hours in ((10, 0), (20, 48), (30, -48)):
            monkeypatch.setattr(time, "time", lambda hours=hours: right() + 3600.0 * hours)
            save_all(trainer, {iteration: None})
        eventually("the removal of commit records", lambda: not list(root.rglob("*.record")))
        assert_these_are_left_whole(root, trainer, [10, 20, 30])


def test_the_lowest_metric_of_all_ranks_counts(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 3) for rank in range(3)]
    save_id = new_save_id()
    for trainer, metrics in zip(trainers, ({}, {"a": 1.0}, {"a": 2.0, "b": 3.0}), strict=True):
        trainer.metrics = metrics
        trainer.stage(1, save_id)
    assert [trainer.outcome().error for trainer in trainers] == [None] * 3
    assert stored(root, 1).manifest.metrics == {"a": 1.0, "b": 3.0}


@pytest.mark.parametrize(
    ("rules", "left"),
    [({"retention": Retention(latest=2)}, [10, 20]), ({"retain_interval": 20}, [20])],
    ids=["latest 2", "every 20"],
)
def test_retention_handles_an_older_save_that_commits_last(
    node: Node, root: Path, rules: dict[str, Any], left: list[int]
) -> None:
    """Two saves are in flight; the older one counts for retention only after its commit.

    The tracker never names it, and yet Megatron's interval removes it.
    """
    trainer = node.trainer(root, **rules)
    trainer.open_run()
    save_all(trainer, {1: None, 2: None})
    earlier = trainer.new_save_id()
    with blocked_shard(root, 10, 0, earlier) as unblock:
        trainer.stage(10, earlier)
        trainer.stage(20, trainer.new_save_id())
        assert trainer.outcome().iteration == 20
        unblock()
        assert trainer.outcome().iteration == 10
    assert_these_are_left_whole(root, trainer, left)
    assert_intact(root, 20, [trainer])
