"""Signals to an agent: those that a scheduler sends to a whole job, and SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.memory.slot import SlotState
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact
from tests.support.agents import agent_here
from tests.support.trainer import (
    PATIENCE_S,
    blocked_shard,
    eventually,
    is_alive,
    new_save_id,
)


def watched(pid: int, for_s: float) -> bool:
    """Return whether `pid` survives for `for_s`, which is several times the time of an exit."""
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline and is_alive(pid):
        time.sleep(0.02)
    return is_alive(pid)


def test_an_agent_commits_staged_slots_after_sigterm_and_leaves(node: Node, root: Path) -> None:
    """All trainers have been killed; without the signal the agent would wait for the grace time."""
    save_id = new_save_id()
    trainer = node.trainer(root)
    agent = trainer.client.agent_pid
    with blocked_shard(root, 1, 0, save_id) as unblock:
        trainer.stage(1, save_id)
        trainer.client.close()
        os.kill(agent, signal.SIGTERM)
        assert watched(agent, 0.7)
        unblock()
        started = time.monotonic()
        eventually("the end of the agent", lambda: not is_alive(agent))
    print(f"agent: gone {time.monotonic() - started:.2f} s after the storage let it write")
    assert_intact(root, 1, [trainer])
    assert list(node.runtime_dir.iterdir()) == []


def test_an_agent_serves_the_last_save_of_connected_trainers_after_sigterm(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    agent = trainer.client.agent_pid
    os.kill(agent, signal.SIGTERM)
    assert watched(agent, 0.7)
    assert trainer.save(1).error is None
    assert trainer.client.agent_pid == agent
    trainer.hang_up()
    eventually("the end of the agent", lambda: not is_alive(agent), within_s=5.0)
    assert_intact(root, 1, [trainer])


@pytest.mark.parametrize("how", ["the deadline passes", "a second SIGTERM comes"])
def test_an_agent_leaves_in_time_after_sigterm_and_another_adopts_its_saves(
    node: Node, root: Path, how: str
) -> None:
    timeout_s = 0.5 if how == "the deadline passes" else 60.0
    trainer = node.trainer(root, config=node.config(sigterm_timeout_s=timeout_s))
    agent, save_id = trainer.client.agent_pid, new_save_id()
    log_file = node.log(root)
    with blocked_shard(root, 1, 0, save_id):
        trainer.stage(1, save_id)
        os.kill(agent, signal.SIGTERM)
        if how == "a second SIGTERM comes":
            assert watched(agent, 0.7)
            os.kill(agent, signal.SIGTERM)
        eventually("the end of the agent", lambda: not is_alive(agent), within_s=5.0)
    log = log_file.read_text()
    unfinished = "ended by a signal: iteration 1 is not durable: the shards of 1 rank (0) are still"
    assert unfinished in log
    assert f"the agent had at most {timeout_s:g} s ('agent.sigterm_timeout_s')" in log
    assert trainer.reconnect() == (save_id,)
    assert trainer.outcome().error is None
    assert_intact(root, 1, [trainer])


def test_signals_meant_for_the_trainers_do_not_end_the_agent(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(trainer.client.agent_pid, number)
    assert watched(trainer.client.agent_pid, 0.3)
    assert trainer.save(1).error is None


@pytest.mark.parametrize("wanted", [True, False], ids=["persist_on_leave", "not"])
def test_an_agent_writes_memory_only_saves_after_sigterm_if_configured(
    node: Node, root: Path, wanted: bool
) -> None:
    """Storage is slow; the agent waits for the write once, and not a second time."""
    trainer = node.trainer(root, config=node.config(persist_on_leave=wanted))
    agent, save_id = trainer.client.agent_pid, new_save_id()
    with blocked_shard(root, 1, 0, save_id) as unblock:
        trainer.stage(1, save_id, state=SlotState.KEPT)
        assert trainer.outcome().kept
        trainer.client.close()
        os.kill(agent, signal.SIGTERM)
        if wanted:
            assert watched(agent, 0.7)
            unblock()
        eventually("the end of the agent", lambda: not is_alive(agent))
    if wanted:
        assert_intact(root, 1, [trainer])
    else:
        assert not (root / file_names.TRACKER).exists()


def test_a_second_signal_may_interrupt_the_handler_of_the_first(node: Node, root: Path) -> None:
    with agent_here(node, root) as agent:
        agent.end_soon()
        with agent._node.flow.rate_limit._lifted._cond:  # type: ignore[attr-defined]
            second = threading.Thread(target=agent.end_soon, daemon=True)
            second.start()
            second.join(PATIENCE_S)
            assert not second.is_alive()
