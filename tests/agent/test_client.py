"""Connections of a rank: the start of the agent, and an agent that is gone or does not answer."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_flashckpt.agent import protocol
from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.agent.connecting import connect
from megatron_flashckpt.agent.silent_agent import last_copies
from megatron_flashckpt.errors import AgentError
from tests.agent.conftest import Node
from tests.support.processes import nothing_left_open
from tests.support.trainer import (
    FakeTrainer,
    content,
    eventually,
    is_alive,
    kill_agent,
    new_save_id,
    run_after,
    suspend,
)

REQUESTS: list[Callable[[AgentClient], object]] = [
    lambda client: client.poll(5.0),
    lambda client: client.acquire(0.0),
    lambda client: client.staged(0),
    lambda client: client.take(),
    lambda client: client.open_run(run_after(None)),
    lambda client: client.fetch_template("x"),
    lambda client: client.leave(),
]


def test_every_request_to_a_killed_agent_fails_and_names_the_log(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    kill_agent(trainer.client.agent_pid)
    log = node.log(root)
    for request in REQUESTS:
        with pytest.raises(AgentError, match="the agent of this node is gone") as raised:
            request(trainer.client)
        assert str(log) in str(raised.value)
        assert "see dmesg; lower 'slots' or give the job more memory" in str(raised.value)
    assert "serves" in log.read_text()


def test_an_agent_that_hangs_does_not_hang_its_trainers(node: Node, root: Path) -> None:
    """The client kills a hung agent, so that another can start; later requests fail at once."""
    trainer = node.trainer(root, config=node.config(answer_timeout_s=0.2))
    suspend(trainer.client.agent_pid)
    for _ in range(2):
        with pytest.raises(AgentError, match=r"is gone \(no answer within 0.2 s\)"):
            trainer.client.poll()
    eventually("the end of the agent", lambda: not is_alive(trainer.client.agent_pid))
    again = node.trainer(root)
    assert again.save(1).error is None


def test_only_local_rank_0_starts_the_agent(node: Node, root: Path) -> None:
    config = node.config(start_timeout_s=0.3)
    with pytest.raises(
        AgentError, match=r"no agent answered at .*agent\.start_timeout_s"
    ) as raised:
        connect(str(root), 1, 1, config, threading.Event())
    assert str(node.place(root)) in str(raised.value)
    assert str(node.log(root)) in str(raised.value)
    assert node.agents() == []


def test_an_agent_of_another_release_is_named_at_once_with_its_process(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = node.trainer(root)
    pid, spoken = trainer.client.agent_pid, protocol.PROTOCOL_VERSION
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "PROTOCOL_VERSION", 999)
        started, error = time.monotonic(), rf"speaks protocol {spoken}; end it \(pid {pid}\)"
        with nothing_left_open(), pytest.raises(AgentError, match=error):
            connect(str(root), 1, 0, node.config(), threading.Event())
        assert time.monotonic() - started < 10.0, (
            "the client does not retry, because a retry cannot help"
        )
    assert trainer.save(1).error is None


def test_all_spellings_of_a_save_directory_lead_to_one_agent(
    node: Node, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    pids = {
        spelling: node.trainer(Path(spelling), rank).client.agent_pid
        for rank, spelling in enumerate([str(root), str(tmp_path / "link"), "save", "./save/"])
    }
    assert len(set(pids.values())) == 1, pids
    assert node.trainer(tmp_path / "other").client.agent_pid not in pids.values()
    assert len(node.agents()) == 2


def test_a_rank_gets_an_agent_even_while_agents_end(node: Node, root: Path) -> None:
    """Ranks connect at any moment while the former agent ends."""
    config = node.config()
    until = time.monotonic() + 3.0

    def connect_and_leave(rank: int) -> None:
        while time.monotonic() < until:
            client = connect(str(root), rank, 0, config, threading.Event())
            assert client.poll().pending == 0
            client.leave()
            client.close()
            time.sleep(random.random() * 0.3)  # roughly until an agent notices the hang-up

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(connect_and_leave, range(3)))
    eventually("the end of all agents", lambda: not node.agents())
    assert list(node.runtime_dir.iterdir()) == []


def test_several_threads_may_use_one_client(node: Node, root: Path) -> None:
    trainer = node.trainer(root)

    def fetched(key: str) -> bytes | None:
        trainer.client.publish_template(key, key.encode())
        return trainer.client.fetch_template(key)

    keys = [str(number) for number in range(200)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fetched, keys)) == [key.encode() for key in keys]
    assert trainer.save(1).error is None


def test_a_staged_message_for_a_missing_or_incomplete_slot_is_refused(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    slot = trainer.begin(1, new_save_id())
    with pytest.raises(AgentError, match="slot 0 of rank 0 is STAGING, not STAGED"):
        trainer.client.staged(slot.index)
    for index in (-1, 2, 10**6):
        with pytest.raises(AgentError, match=f"rank 0 has no slot {index}"):
            trainer.client.staged(index)
    assert trainer.save(2).error is None


# ------------------------------------------------------------- an agent that holds the last copies


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
