"""The agent as a separate process: it outlives the trainers, finishes their saves, and ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatron_flashckpt.file_format import file_names
from tests.agent.conftest import Node
from tests.agent.test_shard_writer import read_rank, stored
from tests.support.trainer import blocked_open, content, eventually, is_alive, new_save_id


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


def test_a_staged_save_is_committed_even_if_all_trainers_are_killed(node: Node, root: Path) -> None:
    save_id = new_save_id()
    shard = root / file_names.iteration_dir(30) / file_names.shard_name(0, save_id)
    with blocked_open(shard) as unblock:
        ranks = [
            node.process(
                root, rank=rank, world_size=2, iterations=[30], save_id=save_id, stop="staged"
            )
            for rank in range(2)
        ]
        (agent,) = {rank.stopped() for rank in ranks}
        for rank in ranks:
            rank.kill()
        assert not (root / file_names.TRACKER).exists(), "the trainers died before the commit"
        assert is_alive(agent)
        unblock()
        eventually("the commit", (root / file_names.TRACKER).exists)
    assert (root / file_names.TRACKER).read_text() == "30"
    for rank in range(2):
        trainer = node.trainer(root, rank, 2)
        assert trainer.client.agent_pid == agent
        expected = content(rank, 30, trainer.layout.nbytes)
        assert read_rank(stored(root, 30), trainer) == expected


def test_an_agent_ends_at_once_when_all_ranks_have_left(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    agent = trainers[0].client.agent_pid
    save_id = new_save_id()
    for trainer in trainers:
        trainer.stage(1, save_id)
    assert [trainer.outcome().error for trainer in trainers] == [None, None]
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
