"""The agent as a separate process: it outlives the trainers and their signals, and ends in time."""

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
from tests.support.agents import agent_here
from tests.support.processes import status_of
from tests.support.stored import assert_intact
from tests.support.trainer import (
    PATIENCE_S,
    blocked_shard,
    eventually,
    is_alive,
    new_save_id,
    run_after,
    save_all,
)


def test_the_process_of_an_agent_is_small_and_apart(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    pid = trainer.client.agent_pid
    assert trainer.save(1).error is None
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert "python" in mapped
    for library in ("libtorch", "libc10", "libcuda", "numpy", "megatron/core", "zmq"):
        assert library not in mapped
    assert "libtorch" in Path("/proc/self/maps").read_text(), (
        "the probe finds libtorch where it is loaded"
    )
    assert os.getsid(pid) not in (os.getsid(0), 0)
    assert os.getpgid(pid) != os.getpgid(0)
    # The process that started the agent has been reaped before `connect` returned.
    assert int(status_of(pid, "PPid")) != os.getpid()
    assert os.getsid(pid) != pid, "a process that leads no session cannot get a terminal"


def test_an_agent_ends_at_once_when_all_ranks_have_left(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    agent = trainers[0].client.agent_pid
    assert save_all(trainers, 1) == [None, None]
    trainers[0].hang_up(leave=True)
    assert trainers[1].client.poll(0.0).pending == 0, "one rank is still connected"
    trainers[1].hang_up(leave=True)
    # The grace time of this test is one minute.
    eventually("the end of the agent", lambda: not is_alive(agent), within_s=5.0)
    assert list(node.runtime_dir.iterdir()) == []
    assert node.agents() == []


def test_an_agent_stays_while_a_killed_rank_may_return(node: Node, root: Path) -> None:
    """Signals that are meant for the trainers do not end it either."""
    config = node.config(grace_s=0.8)
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    agent = trainers[0].client.agent_pid
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(agent, number)
    trainers[0].hang_up(leave=True)
    started = time.monotonic()
    trainers[1].hang_up()
    eventually("the end of the agent", lambda: not is_alive(agent))
    assert time.monotonic() - started >= 0.8


def test_queued_shards_of_an_abandoned_save_are_not_written(node: Node, root: Path) -> None:
    """Before, they were written in full and removed; the next saves waited for their slots."""
    config = node.config(persist_threads=1)
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    save_id = new_save_id()
    log = node.log(root)
    with blocked_shard(root, 1, 0, save_id) as unblock:
        for trainer in trainers:
            trainer.stage(1, save_id)
            trainer.hang_up()
        later = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
        run = run_after(None)
        for trainer in later:
            trainer.join(run)
        eventually("the end of the save", lambda: "iteration 1 was not saved" in log.read_text())
        unblock()
        assert save_all(later, 2) == [None, None]
    assert "rank 1: persisted iteration 2" in log.read_text()
    assert "rank 1: persisted iteration 1" not in log.read_text()
    assert "ERROR" not in log.read_text(), "training went on, so nothing has failed"
    assert_intact(root, 2, later)


@pytest.mark.parametrize("leaves", ["after SIGTERM", "after the grace time"])
def test_a_save_that_cannot_be_complete_does_not_delay_the_end_of_an_agent(
    node: Node, root: Path, leaves: str
) -> None:
    """Both ranks are dead, and only one has staged the last save."""
    after_sigterm = leaves == "after SIGTERM"
    config = node.config(**({"sigterm_timeout_s": 15.0} if after_sigterm else {"grace_s": 0.5}))
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    agent, run = trainers[0].client.agent_pid, run_after(None)
    for trainer in trainers:
        trainer.join(run)
    assert save_all(trainers, 4) == [None, None]
    trainers[0].stage(7, trainers[0].new_save_id())
    for trainer in trainers:
        trainer.hang_up()
    if after_sigterm:
        os.kill(agent, signal.SIGTERM)
    eventually("the end of the agent", lambda: not is_alive(agent), 5.0)
    assert_intact(root, 4, trainers)


# ---------------------------------------------------------------------- signals


def watched(pid: int, for_s: float) -> bool:
    """Return whether `pid` survives for `for_s`, which is several times the time of an exit."""
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline and is_alive(pid):
        time.sleep(0.02)
    return is_alive(pid)


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
        with agent._node.flow._lifted._cond:  # type: ignore[attr-defined]
            second = threading.Thread(target=agent.end_soon, daemon=True)
            second.start()
            second.join(PATIENCE_S)
            assert not second.is_alive()
