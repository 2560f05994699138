"""Upkeep: an agent restores its own files when a cleaner removes them, so trainers find them."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flashckpt.agent.launcher import SilentHolder
from megatron_flashckpt.agent.socket_dir import LOCK, LOG, SOCKET, holder
from tests.agent.conftest import Node
from tests.support.trainer import eventually, is_alive, suspend

PATIENCE_S = 60.0


def take_socket(directory: Path) -> None:
    (directory / SOCKET).unlink()


def take_lock(directory: Path) -> None:
    (directory / LOCK).unlink()


def take_all_files(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def take_directory(directory: Path) -> None:
    shutil.rmtree(directory)


def take_all_directories(directory: Path) -> None:
    shutil.rmtree(directory.parent)


def put_another_file(directory: Path) -> None:
    (directory / SOCKET).unlink()
    (directory / SOCKET).touch()


@pytest.mark.parametrize(
    "take",
    [
        take_socket,
        take_lock,
        take_all_files,
        take_directory,
        take_all_directories,
        put_another_file,
    ],
)
def test_an_agent_restores_removed_files_at_once_and_keeps_its_memory(
    node: Node, root: Path, take: Callable[[Path], None]
) -> None:
    trainer = node.trainer(root)
    agent = trainer.client.agent_pid
    assert trainer.keep(1).error is None
    directory = node.directory(root)
    before = {path.name: path.lstat() for path in directory.iterdir()}
    take(directory)
    eventually(
        "the restored files of the agent",
        lambda: holder(directory) == agent and _listens(directory, before),
    )
    trainer.hang_up()
    again = node.trainer(root)
    assert again.client.agent_pid == agent
    assert [offer.iteration for offer in again.take()] == [1]
    assert again.save(2).error is None
    assert {path.name for path in directory.iterdir()} == {SOCKET, LOCK, LOG}
    assert node.agents() == [agent]
    again.hang_up(leave=True)
    eventually("the end of the agent", lambda: not is_alive(agent))
    eventually("the removal of all files", lambda: list(node.runtime_dir.iterdir()) == [])


def _listens(directory: Path, before: dict[str, os.stat_result]) -> bool:
    try:
        status = (directory / SOCKET).lstat()
    except FileNotFoundError:
        return False
    # If only the lock is missing, the agent also restores the socket; a check may be under way.
    return not os.path.samestat(status, before[SOCKET])


def test_a_rank_that_reconnects_after_the_socket_was_removed_saves_at_once(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    agent = trainer.client.agent_pid
    assert trainer.save(1).error is None
    take_socket(node.directory(root))
    trainer.reconnect()
    assert trainer.client.agent_pid == agent
    assert trainer.save(2).error is None


def test_an_agent_keeps_its_files_recent(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    directory = node.directory(root)
    paths = [*directory.iterdir(), directory, directory.parent]
    old = time.time() - 20 * 24 * 3600
    for path in paths:
        os.utime(path, (old, old))
    eventually(
        "the new times of all files",
        lambda: all(path.lstat().st_mtime > old + 3600 for path in paths),
    )
    assert all(path.lstat().st_atime > old + 3600 for path in paths)
    assert trainer.save(1).error is None


def test_an_agent_that_does_not_restore_its_socket_is_named_and_replaced(
    node: Node, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = node.config(start_timeout_s=PATIENCE_S)
    trainer = node.trainer(root, config=config)
    agent = trainer.client.agent_pid
    suspend(agent)
    take_socket(node.directory(root))
    trainer.hang_up()
    again = node.trainer(root, config=config)
    assert again.client.agent_pid != agent
    eventually("the end of the agent", lambda: not is_alive(agent))
    lock = node.directory(root) / LOCK
    assert f"{lock}: is held by process {agent}, which has no socket there: killed" in caplog.text
    assert again.save(1).error is None


@pytest.mark.parametrize(
    "text", [b"%d\n" % os.getpid(), b"", b"x"], ids=["another process", "nothing", "no pid"]
)
def test_a_process_that_holds_the_lock_is_named_and_not_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("killed"))
    monkeypatch.setattr("megatron_flashckpt.agent.launcher._PROBE_S", 0.0)
    silent = SilentHolder(0.0, 0.0)
    assert silent.may_start(tmp_path), "no process holds the lock"
    (tmp_path / LOCK).write_bytes(text)
    assert silent.may_start(tmp_path), "the lock is old, but no process holds it"
    fd = os.open(tmp_path / LOCK, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with caplog.at_level(logging.ERROR):
        assert [silent.may_start(tmp_path) for _ in range(3)] == [False] * 3
    assert "end it on this node" in caplog.text
    os.close(fd)
    assert silent.may_start(tmp_path)


def test_an_agent_whose_place_was_taken_leaves_the_place_to_the_other(
    node: Node, root: Path
) -> None:
    first = node.trainer(root)
    agent = first.client.agent_pid
    directory = node.directory(root)
    suspend(agent)
    take_directory(directory)
    second = node.trainer(root)  # no file names the first agent any more
    assert second.client.agent_pid != agent
    os.kill(agent, signal.SIGCONT)
    assert first.save(1).error is None, "the trainers of the first agent continue"
    first.hang_up(leave=True)
    eventually("the end of the agent", lambda: not is_alive(agent))
    assert second.save(2).error is None
    second.find_agent()
    assert node.agents() == [second.client.agent_pid]
