"""Messages of failures: the fact, the place, and the right remedy."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.agent import commit_core
from megatron_flashckpt.agent import process as process_module
from megatron_flashckpt.agent.connecting import connect
from megatron_flashckpt.agent.protocol import OpenPeers
from megatron_flashckpt.errors import AgentError, AgentRefusedError
from megatron_flashckpt.file_format import file_names
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.trainer import blocked_shard, eventually, new_save_id, remove_tree


def test_a_save_is_not_lost_because_its_directory_is_away_for_a_moment(
    node: Node, root: Path
) -> None:
    trainer, save_id = node.trainer(root), new_save_id()
    away = root.with_name("away")
    with blocked_shard(root, 1, 0, save_id) as unblock:
        trainer.stage(1, save_id)
        eventually("the agent waits for the save", lambda: trainer.client.poll(0.2).pending)
        root.rename(away)
        (away / file_names.iteration_dir(1) / file_names.shard_name(0, save_id)).unlink()
        unblock()
    time.sleep(2.2)  # the agent looks at the path every 2 s
    away.rename(root)
    assert trainer.outcome().error is None


def test_a_directory_that_is_removed_during_a_write_is_named_and_not_made_again(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the directory was only away, the error would come after 50 s.

    A save into a mount point without its mount would count as a checkpoint.
    """
    monkeypatch.setattr(commit_core, "_LASTING_S", 0.5)
    with agent_here(node, root):
        trainer, save_id = node.trainer(root), new_save_id()
        with blocked_shard(root, 1, 0, save_id) as unblock:
            trainer.stage(1, save_id)
            eventually("the agent waits for the save", lambda: trainer.client.poll(0.2).pending)
            remove_tree(root)
            unblock()
            errors = [trainer.outcome().error or "", trainer.save(2).error or ""]
        for error in errors:
            assert f"{root}: is away, or another directory is in its place" in error
        assert not root.exists()


def test_an_error_explains_a_limit_on_file_sizes(node: Node, root: Path) -> None:
    """The agent inherits the limit from the process that starts it."""
    trainer = node.trainer(root, numel=2**20)
    resource.prlimit(trainer.client.agent_pid, resource.RLIMIT_FSIZE, (2**20, 2**20))
    error = trainer.save(1).error or ""
    assert "File too large" in error
    assert "raise the file size limit (ulimit -f) of the user that starts the job" in error
    assert str(root / file_names.iteration_dir(1)) in error


@pytest.mark.parametrize(
    ("script", "ended_by"),
    [("kill -KILL $$", "SIGKILL"), ("exit 1", "status 1")],
    ids=["the agent", "its child"],
)
def test_an_error_explains_an_agent_killed_during_its_start(
    node: Node,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    ended_by: str,
) -> None:
    """The process that is started waits for its child, and ends with status 1 if that is killed."""
    doomed = tmp_path / "python"
    doomed.write_text(f"#!/bin/sh\n{script}\n")
    doomed.chmod(0o755)
    node.log(root).write_text("an unrelated line\n")
    monkeypatch.setattr(process_module.sys, "executable", str(doomed))
    with pytest.raises(AgentError) as raised:
        connect(str(root), 0, 0, node.config(), threading.Event())
    error = str(raised.value)
    assert error.startswith(f"the agent was ended by {ended_by} while it started")
    assert "unrelated" not in error
    assert "see dmesg; lower 'slots' or give the job more memory" in error
    assert str(node.log(root)) in error


def test_an_agent_starts_although_the_disk_of_its_log_is_full(small_disk: Path, root: Path) -> None:
    node = Node(small_disk / "r")
    node.log(root).touch()
    with contextlib.suppress(OSError), open(small_disk / "ballast", "wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))
    try:
        assert node.trainer(root).save(1).error is None
    finally:
        node.close()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EDQUOT, "free space there, or set 'runtime_dir'"), (errno.EMFILE, "(ulimit -n)")],
    ids=["quota", "descriptors"],
)
def test_an_agent_without_a_log_file_is_explained(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    """Before, the rank got an error that is none of this package, and training stopped."""
    log, opens = node.log(root), os.open

    def refuse(path: Any, *rest: Any, **more: Any) -> int:
        if path == log:
            raise OSError(number, os.strerror(number))
        return opens(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AgentError) as raised:
        connect(str(root), 0, 0, node.config(), threading.Event())
    assert f"{log}: cannot be opened ({os.strerror(number)}), so no agent" in str(raised.value)
    assert str(raised.value).count(";") == 1
    assert remedy in str(raised.value)
    with pytest.raises(AgentError) as in_foreground:
        node.place(root).open_log()
    assert str(in_foreground.value) == str(raised.value)


def test_a_rank_without_a_free_process_explains_that_it_has_no_agent(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(AgentError) as raised:
        connect(str(root), 0, 0, node.config(), threading.Event())
    assert "the agent could not be started (Resource temporarily unavailable)" in str(raised.value)
    assert "'ulimit -u'" in str(raised.value)


#: A meta path finder; the agent's interpreter runs this file when it starts.
BLOCKER = """\
import sys
class Blocker:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "zmq":
            raise ModuleNotFoundError("No module named 'zmq'", name=name)
sys.meta_path.insert(0, Blocker())
"""


def test_an_agent_without_pyzmq_refuses_to_open_peers_and_names_the_extra(
    node: Node, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "blocker"
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(BLOCKER)
    path = filter(None, (str(blocker), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    trainer = node.trainer(root)
    expected = r"cannot import \(No module named 'zmq'\).*'megatron_flashckpt\[redundancy\]'"
    for _ in range(2):
        with pytest.raises(AgentRefusedError, match=expected):
            trainer.client.open_peers(OpenPeers("127.0.0.1", 1))
    assert trainer.save(1).error is None
    assert [offer.iteration for offer in trainer.take()] == [1]
