"""What a user reads of trouble: the fact, the place, and a remedy that is the right one."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.agent import client as client_module
from megatron_flashckpt.agent.client import connect
from megatron_flashckpt.agent.rendezvous import LOG
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.layout import names
from tests.agent.conftest import Node
from tests.agent.trainer import eventually, held_back, is_alive, new_save_id

REMOVED = "another process removed the directory meanwhile"
MEMORY = "dmesg tells; lower 'slots' or give the job more memory"


def test_a_save_directory_that_is_removed_while_a_shard_is_written(node: Node, root: Path) -> None:
    trainer, save_id = node.trainer(root), new_save_id()
    shard = root / names.iteration_dir(1) / names.shard_name(0, save_id)
    with held_back(shard) as let_go:
        trainer.stage(1, save_id)
        eventually("the agent waits for it", lambda: trainer.client.poll(0.2).pending)
        shutil.rmtree(root)
        let_go()
        error = trainer.outcome().error or ""
    assert str(shard.parent) in error
    assert REMOVED in error
    assert "No such file or directory" in error
    assert trainer.save(2).error is None, "the next save makes the directory anew"


def test_a_limit_on_the_size_of_files_in_mid_run(node: Node, root: Path) -> None:
    """Inherited by the agent from whoever started it."""
    trainer = node.trainer(root, numel=2**20)
    resource.prlimit(trainer.client.agent_pid, resource.RLIMIT_FSIZE, (2**20, 2**20))
    error = trainer.save(1).error or ""
    assert "File too large" in error
    assert "raise the file size limit (ulimit -f) of whoever starts the job" in error
    assert str(root / names.iteration_dir(1)) in error


def test_an_agent_that_is_killed_in_mid_run(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    agent = trainer.client.agent_pid
    os.kill(agent, signal.SIGKILL)
    eventually("its end", lambda: not is_alive(agent))
    with pytest.raises(AgentError) as raised:
        trainer.client.poll()
    assert str(node.directory(root) / LOG) in str(raised.value)
    assert MEMORY in str(raised.value)


@pytest.mark.parametrize("former", ["", "an unrelated line of an earlier agent\n"])
def test_an_agent_that_is_killed_while_it_starts(
    node: Node, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, former: str
) -> None:
    log = node.directory(root) / LOG
    log.write_text(former)
    doomed = tmp_path / "python"
    doomed.write_text("#!/bin/sh\nkill -KILL $$\n")
    doomed.chmod(0o755)
    monkeypatch.setattr(client_module.sys, "executable", str(doomed))
    with pytest.raises(AgentError) as raised:
        connect(str(root), 0, 0, node.config())
    error = str(raised.value)
    assert error.startswith("the agent was ended by SIGKILL while it started")
    assert MEMORY in error
    assert str(log) in error
    assert "unrelated" not in error


def test_an_agent_whose_child_is_killed_while_it_starts(
    node: Node, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent, which waits for its child, then ends with status 1 and says nothing."""
    doomed = tmp_path / "python"
    doomed.write_text("#!/bin/sh\nexit 1\n")
    doomed.chmod(0o755)
    (node.directory(root) / LOG).write_text("an unrelated line\n")
    monkeypatch.setattr(client_module.sys, "executable", str(doomed))
    with pytest.raises(AgentError, match="ended by status 1 while it started") as raised:
        connect(str(root), 0, 0, node.config())
    assert "unrelated" not in str(raised.value)
    assert MEMORY in str(raised.value)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group that is allowed 4 MiB of memory. Ask for it before `node`, which uses it."""
    path = Path(f"/sys/fs/cgroup/memory/flashckpt-{new_save_id()}")
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (path / "memory.limit_in_bytes").write_text(str(4 * 2**20))
    except OSError as error:
        path.rmdir()
        pytest.skip(f"no limit can be set here: {error}")
    yield path
    eventually("no process in the group", lambda: not (path / "cgroup.procs").read_text())
    path.rmdir()


def test_an_agent_that_its_control_group_kills_for_memory(
    small_group: Path, node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    agent, save_id = trainer.client.agent_pid, new_save_id()
    with held_back(root / names.iteration_dir(1) / names.shard_name(0, save_id)):
        trainer.stage(1, save_id)
        try:
            (small_group / "cgroup.procs").write_text(str(agent))
        except OSError as error:
            pytest.skip(f"no process can join a control group here: {error}")
        with pytest.raises(AgentError, match=MEMORY):
            trainer.client.publish_template("0" * 16, bytes(64 * 2**20))
        eventually("its end", lambda: not is_alive(agent))
    assert trainer.reconnect() == (save_id,), "the next agent has what was staged"
    assert trainer.outcome().error is None
    assert trainer.client.agent_pid != agent
