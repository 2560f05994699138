"""An agent that does not answer is spared while only it holds a checkpoint of dead ranks."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from megatron_flashckpt.agent.silent_agent import last_copies
from tests.agent.conftest import Node
from tests.support.trainer import FakeTrainer, content, suspend


def dead_ranks(node: Node, root: Path) -> tuple[int, list[FakeTrainer]]:
    """Return the agent that alone holds iteration 2, and its two ranks, which have crashed."""
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    agent = trainers[0].client.agent_pid
    for trainer in trainers:
        trainer.keep(2, "of iteration 2")
    assert last_copies(agent) == (), "living ranks hold their slabs, too"
    for trainer in trainers:
        trainer.hang_up()
    assert [(slab.rank, slab.iteration) for slab in last_copies(agent)] == [(0, 2), (1, 2)]
    return agent, trainers


def test_a_restarted_rank_waits_for_a_frozen_agent_with_the_only_copy(
    node: Node, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent, _ = dead_ranks(node, root)
    suspend(agent)
    thaw = threading.Timer(1.5, os.kill, (agent, signal.SIGCONT))
    thaw.start()
    config = node.config(answer_timeout_s=0.1, start_timeout_s=0.5)
    again = node.trainer(root, 0, 2, config=config)
    thaw.join()
    assert again.client.agent_pid == agent
    (offer,) = again.take()
    assert again.bytes_in(offer.slot) == content(0, 2, again.layout.nbytes)
    (line,) = [text for text in caplog.messages if "has not answered" in text]
    assert line.startswith(f"agent {agent} has not answered for 0.5 s; it gets 5 s more")
    assert "of rank 1 (iteration 2, not in storage)" in line


def test_a_frozen_agent_is_replaced_at_last_and_the_loss_is_named(
    node: Node, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent, _ = dead_ranks(node, root)
    suspend(agent)
    config = node.config(answer_timeout_s=0.1, start_timeout_s=0.7)
    again = node.trainer(root, config=config)
    assert again.client.agent_pid != agent
    (line,) = [text for text in caplog.messages if "did not answer" in text]
    assert f"agent {agent} did not answer within 0.7 s: killed; lost with it: " in line
    assert "of rank 0 (iteration 2, not in storage)" in line
    assert again.take() == ()
