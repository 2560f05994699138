"""The agent as a separate process: it outlives the trainers, and ends when it is not needed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact, save_all
from tests.support.trainer import blocked_shard, eventually, is_alive, new_save_id, run_after


def test_the_process_of_an_agent_is_small_and_apart(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    pid = trainer.client.agent_pid
    assert trainer.save(1).error is None
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert "python" in mapped
    for library in ("libtorch", "libc10", "libcuda", "numpy", "megatron/core"):
        assert library not in mapped
    assert "libtorch" in Path("/proc/self/maps").read_text(), (
        "the probe finds libtorch where it is loaded"
    )
    assert os.getsid(pid) not in (os.getsid(0), 0)
    assert os.getpgid(pid) != os.getpgid(0)
    # The process that started the agent has been reaped before `connect` returned.
    status = Path(f"/proc/{pid}/status").read_text()
    parent = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid"))
    assert int(parent) != os.getpid()
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
    config = node.config(grace_s=0.8)
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    agent = trainers[0].client.agent_pid
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
