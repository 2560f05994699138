"""A failed save, which the agent keeps and writes again when all trainers are gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megatron_flashckpt.agent import server
from megatron_flashckpt.catalog.listing import committed_iterations
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.agent.test_memory_only import assert_the_agent_leaves
from tests.support.agents import agent_here
from tests.support.stored import assert_intact, files_of_ours
from tests.support.trainer import (
    FakeTrainer,
    content,
    eventually,
    save_all,
)


def start(root: Path, *nodes: Node, **agent: float) -> list[FakeTrainer]:
    """Return a rank on each of the nodes."""
    return [
        place.trainer(root, rank, 2, config=place.config(**{"grace_s": 0.3, **agent}))
        for rank, place in enumerate(nodes)
    ]


def fail(trainers: list[FakeTrainer], root: Path, iteration: int) -> Path:
    """Let a save of all ranks fail; return the path that blocks it."""
    obstacle = root / file_names.iteration_dir(iteration)
    obstacle.parent.mkdir(exist_ok=True)
    obstacle.write_text("in the way")
    assert None not in save_all(trainers, iteration)
    return obstacle


@pytest.mark.parametrize(("nodes", "leave"), [(1, True), (2, False)], ids=["ended", "killed"])
def test_a_failed_save_is_written_if_storage_works_when_the_trainers_left(
    node: Node, other_node: Node, root: Path, nodes: int, leave: bool
) -> None:
    trainers = start(root, node, node if nodes == 1 else other_node)
    agents = [trainer.client.agent_pid for trainer in trainers]
    assert save_all(trainers, 1) == [None, None]
    fail(trainers, root, 2).unlink()
    assert_intact(root, 1, trainers)
    for trainer in trainers:
        trainer.hang_up(leave=leave)
    for agent in agents:
        assert_the_agent_leaves(agent)
    assert_intact(root, 2, trainers)


def test_an_agent_leaves_when_its_time_is_over_and_storage_still_fails(
    node: Node, root: Path
) -> None:
    trainers = start(root, node, node, keep_unwritten_s=10.0)
    agent = trainers[0].client.agent_pid
    assert save_all(trainers, 1) == [None, None]
    obstacle = fail(trainers, root, 2)
    before = files_of_ours(root)
    for trainer in trainers:
        trainer.hang_up(leave=True)
    assert_the_agent_leaves(agent)
    assert files_of_ours(root) == before
    assert obstacle.read_text() == "in the way"
    assert_intact(root, 1, trainers)
    before_the_end, _, at_the_end = node.log(root).read_text().partition("writing it before")
    # This happens once, or for each rank if the save failed before the second rank staged.
    assert before_the_end.count("iteration 2 was not saved") in (1, 2)
    assert at_the_end.count("iteration 2 was not saved") == 1
    assert "this node's host memory holds iteration 2 until " in at_the_end
    assert "iteration 2 is lost" in at_the_end


def test_agents_try_again_until_storage_takes_the_only_copy(
    node: Node, other_node: Node, root: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    """No end can be written meanwhile, so all nodes stay at one name."""
    monkeypatch.setattr(server, "_AGAIN_S", 0.3)
    with agent_here(node, root), agent_here(other_node, root):
        trainers = start(root, node, other_node)
        assert save_all(trainers, 1) == [None, None]
        obstacle = fail(trainers, root, 2)
        for trainer in trainers:
            trainer.hang_up(leave=True)
            time.sleep(2.0)  # the nodes begin at different times, several attempts apart
        # A job that starts meanwhile resumes from it, and ends without a save of its own.
        for trainer in start(root, node, other_node):
            (offer,) = (offer for offer in trainer.take() if offer.iteration == 2)
            expected = content(trainer.rank, 2, trainer.layout.nbytes)
            assert (trainer.bytes_in(offer.slot), offer.durable) == (expected, False)
            trainer.hang_up(leave=True)
        obstacle.unlink()
        tracker = root / file_names.TRACKER
        eventually("the commit of the only copy", lambda: tracker.read_text() == "2")
        assert_intact(root, 2, trainers)


def test_a_later_run_ends_the_attempts(node: Node, other_node: Node, root: Path) -> None:
    """The overtaken agent holds saves of a past that the later run does not continue."""
    trainer = node.trainer(root, config=node.config(grace_s=0.1))
    agent = trainer.client.agent_pid
    trainer.open_run()
    fail([trainer], root, 2).unlink()
    other = other_node.trainer(root)
    other.open_run(policy="take_over")
    trainer.hang_up(leave=True)
    assert_the_agent_leaves(agent)
    assert committed_iterations(PosixStore(root)) == []


def test_sigterm_ends_an_agent_with_the_only_copy_after_one_more_attempt(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    agent = trainer.client.agent_pid
    fail([trainer], root, 2)
    trainer.hang_up(leave=True)
    log = node.log(root)
    eventually("the line about it", lambda: "holds iteration 2 until" in log.read_text())
    os.kill(agent, signal.SIGTERM)
    assert_the_agent_leaves(agent)
    text = log.read_text()
    assert text.count("writing it before leaving") == 2
    assert "iteration 2 is lost: only this agent's memory holds it" in text
