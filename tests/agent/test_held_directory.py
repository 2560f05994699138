"""An agent serves one directory, and not another directory at the same path.

The bind mounts are real; each has a mount namespace of its own that ends with its processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.agent import connecting, held_directory
from megatron_flashckpt.agent.held_directory import HeldDirectory, identity_of
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format.file_names import ALIVE
from tests.agent.conftest import Node
from tests.support.processes import open_files
from tests.support.stored import stored
from tests.support.trainer import (
    FakeTrainer,
    copy_tree,
    eventually,
    is_alive,
    new_save_id,
    remove_tree,
)

_SCRIPT = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'


def mounted(directory: Path, path: Path) -> tuple[str, ...]:
    """Return a command prefix that mounts `directory` at `path` in a new namespace."""
    shell = ("sh", "-c", _SCRIPT, "sh", str(directory), str(path))
    return ("unshare", "--mount", "--propagation", "private", *shell)


def logs(node: Node) -> list[str]:
    return [log.read_text() for log in node.runtime_dir.iterdir()]


def test_an_error_that_passes_leads_no_trainer_to_another_agent(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the rank got a new agent, which lacked its checkpoint in memory."""
    expected, refused = node.place(root), []

    def refuse_twice(path: Any, *args: Any, **named: Any) -> Any:
        if str(path) == str(root) and len(refused) < 2:
            refused.append(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return os.stat(path, *args, **named)

    monkeypatch.setattr(held_directory, "_RETRIES_S", (0.001, 0.001))
    # `makedirs` makes its own calls and tolerates errors of these.
    patched = SimpleNamespace(**{**vars(os), "stat": refuse_twice})
    monkeypatch.setattr(held_directory, "os", patched)
    assert node.place(root) == expected
    assert len(refused) == 2


def test_an_error_that_passes_leaves_no_directory_unheld(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    opened, answers = HeldDirectory._opened, iter([OSError(errno.ESTALE, "stale")])

    def refuse_once(held: HeldDirectory) -> tuple[int, str]:
        if error := next(answers, None):
            raise error
        return opened(held)

    monkeypatch.setattr(held_directory, "_LOOK_S", 0.01)
    monkeypatch.setattr(HeldDirectory, "_opened", refuse_once)
    with contextlib.closing(HeldDirectory(str(root), lambda: True)) as held:
        eventually("the directory is held", lambda: held.identity == identity_of(str(root)))


def held_by(trainer: FakeTrainer) -> int:
    """Return the agent of a trainer, once it holds its directory."""
    agent = trainer.client.agent_pid
    eventually("the directory is held", lambda: str(trainer.root) in open_files(agent))
    return agent


def test_two_directories_mounted_at_one_path_have_separate_agents(
    node: Node, root: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for directory in (root, one, two):
        directory.mkdir()
    try:
        subprocess.run([*mounted(one, root), "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine refuses to mount in a namespace: {error}")
    agents = []
    ids = [new_save_id() for _ in range(3)]
    for n, directory in enumerate((one, two, one)):
        trainer = node.process(
            root,
            iterations=[n + 1],
            save_id=ids[n],
            stop="committed",
            inside=mounted(directory, root),
        )
        agents.append(trainer.stopped())
        trainer.kill()
    assert agents[0] == agents[2] != agents[1], "a restart finds the agent of its directory"
    assert [stored(one, n).manifest.save_id for n in (1, 3)] == [ids[0], ids[2]]
    assert stored(two, 2).manifest.save_id == ids[1]
    assert [len(list(path.glob("iter_*"))) for path in (one, two, root)] == [2, 1, 0]


def test_a_directory_that_replaces_another_gets_another_agent(
    node: Node, root: Path, tmp_path: Path
) -> None:
    """The agent of a removed directory frees its memory after its trainers have gone."""
    first = node.trainer(root, config=node.config(grace_s=3.0))
    assert first.save(1).error is None
    agent = held_by(first)
    root.rename(tmp_path / "away")
    second = node.trainer(root)
    assert second.client.agent_pid != agent
    assert second.take() == ()
    assert second.save(2).error is None
    assert is_alive(agent)
    first.hang_up()
    eventually("the end of the agent", lambda: not is_alive(agent), 60)
    assert second.save(4).error is None
    assert [path.name for path in sorted((tmp_path / "away").glob("iter_*"))] == ["iter_0000001"]


@pytest.mark.parametrize("is_removed", [False, True], ids=["away", "removed"])
def test_what_storage_lacks_is_kept_longer_than_the_grace_unless_the_directory_was_removed(
    node: Node, root: Path, tmp_path: Path, is_removed: bool
) -> None:
    trainer = node.trainer(root, config=node.config(grace_s=2.0, commit_timeout_s=2.0))
    agent = held_by(trainer)
    assert trainer.save(4).error is None
    assert trainer.keep(12).kept
    root.rename(tmp_path / "away")
    trainer.hang_up()
    kept = "this node's host memory holds iteration 12 until"
    eventually("more than the grace", lambda: any(kept in text for text in logs(node)), 30)
    if is_removed:
        remove_tree(tmp_path / "away")
        eventually("the end of the agent", lambda: not is_alive(agent), 30)
        lost = f"the agent ends because {root} was removed"
        assert any(lost in text for text in logs(node))
        return
    time.sleep(2.0)
    (tmp_path / "away").rename(root)
    again = node.trainer(root)
    assert (again.client.agent_pid, again.take()[0].iteration) == (agent, 12)


@pytest.mark.parametrize("at_once", [True, False], ids=["restarted at once", "later"])
def test_memory_outlives_a_new_device_number_of_its_directory(
    node: Node, root: Path, tmp_path: Path, at_once: bool
) -> None:
    """A copy of the directory stands for a file system that is mounted again: it knows the run."""
    trainer = node.trainer(root)
    trainer.open_run()
    agent = held_by(trainer)
    assert trainer.save(4).error is None
    assert trainer.keep(12).kept
    trainer.hang_up()
    eventually("the end of its sign of life", lambda: not list((root / ALIVE).glob("*")))
    copy_tree(root, tmp_path / "copy")
    root.rename(tmp_path / "away")
    (tmp_path / "copy").rename(root)
    if not at_once:
        eventually("the agent moves", node.place(root).listener, 30)
    again = node.trainer(root)
    assert (again.client.agent_pid, again.take()[0].iteration) == (agent, 12)
    assert again.save(13).error is None
    assert (root / "iter_0000013").exists()
    assert list(node.runtime_dir.iterdir()) == [node.log(root)], "the log moves, too"
    again.hang_up(leave=True)
    eventually("the end of the agent", lambda: not is_alive(agent))
    assert list(node.runtime_dir.iterdir()) == []


def test_a_job_prints_which_memory_of_another_directory_it_does_not_use(
    node: Node,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connecting, "_MOVE_S", 0.1)
    trainer = node.trainer(root)
    agent = held_by(trainer)
    assert trainer.keep(12).kept
    trainer.hang_up()
    root.rename(tmp_path / "away")
    again = node.trainer(root)
    assert again.client.agent_pid != agent
    assert again.take() == ()
    assert f"agent {agent} of this node holds " in caplog.text
    assert "of rank 0 (iteration 12, not in storage) of another directory" in caplog.text


def test_an_agent_refuses_a_trainer_that_sees_another_directory(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = node.trainer(root)
    agent, own = held_by(trainer), identity_of(str(root))
    monkeypatch.setattr(connecting, "identity_of", lambda root: "device 7:7, inode 7")
    with pytest.raises(AgentError) as refused:
        node.trainer(root)
    assert f"(pid {agent}) serves {root} ({own})" in str(refused.value)
    assert "(device 7:7, inode 7)" in str(refused.value)
    assert trainer.save(1).error is None, "the agent still serves the first trainer"
