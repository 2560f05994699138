"""Connections of a rank: the start of the agent, and the errors when the agent is gone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flashckpt.agent import protocol
from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.agent.connecting import connect
from megatron_flashckpt.errors import AgentError
from tests.agent.conftest import Node
from tests.support.processes import nothing_left_open
from tests.support.trainer import (
    PATIENCE_S,
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
        connect(str(root), 1, 1, config)
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
            connect(str(root), 1, 0, node.config())
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
    failures: list[BaseException] = []
    until = time.monotonic() + 3.0

    def connect_and_leave(rank: int) -> None:
        while time.monotonic() < until:
            try:
                client = connect(str(root), rank, 0, config)
                assert client.poll().pending == 0
                client.leave()
                client.close()
            except BaseException as error:
                failures.append(error)
            time.sleep(random.random() * 0.3)  # roughly until an agent notices the hang-up

    threads = [threading.Thread(target=connect_and_leave, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failures == []
    eventually("the end of all agents", lambda: not node.agents())
    assert list(node.runtime_dir.iterdir()) == []


def test_several_threads_may_use_one_client(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    wrong: list[str] = []

    def use(name: str) -> None:
        for number in range(50):
            key = f"{name}-{number}"
            trainer.client.publish_template(key, key.encode())
            if trainer.client.fetch_template(key) != key.encode():
                wrong.append(key)

    threads = [threading.Thread(target=use, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []
    assert trainer.save(1).error is None


def test_a_staged_message_for_a_missing_or_incomplete_slot_is_refused(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    slot = trainer.begin(1, new_save_id())
    assert slot is not None
    with pytest.raises(AgentError, match="slot 0 of rank 0 is STAGING, not STAGED"):
        trainer.client.staged(slot.index)
    for index in (-1, 2, 10**6):
        with pytest.raises(AgentError, match=f"rank 0 has no slot {index}"):
            trainer.client.staged(index)
    assert trainer.save(2).error is None
