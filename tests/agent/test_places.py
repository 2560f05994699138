"""The place of an agent: only its user gets there, and nobody else takes it unnoticed."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_flashckpt.agent import place
from megatron_flashckpt.agent.connecting import connect
from megatron_flashckpt.agent.held_directory import ensure
from megatron_flashckpt.agent.place import AgentSocket, Place, PlaceTakenError, place_of
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError
from tests.agent.conftest import Node
from tests.support.trainer import config_of, new_save_id

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def place_in(runtime_dir: Path) -> Place:
    return place_of("/some/save", str(runtime_dir))


@pytest.mark.parametrize("mode", [0o750, 0o701])
def test_a_directory_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(AgentError, match=rf"other users can reach it \(mode 0{mode:o}\)") as raised:
        connect(str(tmp_path / "save"), 0, 0, config_of(path), threading.Event())
    assert f"chmod 700 {path}" in str(raised.value)


def a_link(path: Path) -> None:
    path.with_name("real").mkdir(mode=0o700)
    path.symlink_to(path.with_name("real"))


def a_link_to_nowhere(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def of_another_user(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, -1)


@pytest.mark.parametrize(
    "occupy",
    [a_link, a_link_to_nowhere, Path.touch, pytest.param(of_another_user, marks=as_root)],
)
def test_what_is_no_directory_of_this_user_is_refused(
    tmp_path: Path, occupy: Callable[[Path], None]
) -> None:
    occupy(tmp_path / "run")
    with pytest.raises(AgentError, match=rf"run: is not a directory of user {os.getuid()}"):
        place_in(tmp_path / "run").prepare()
    assert not (tmp_path / "nowhere").exists()


def test_a_place_where_no_directory_can_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AgentError, match=r"cannot be created .*'runtime_dir'"):
        place_in(tmp_path / "file" / "run").prepare()


def test_a_relative_runtime_dir_starts_at_the_directory_of_the_rank(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    node = Node(tmp_path / "run")
    try:
        trainer = node.trainer(root, config=Config(runtime_dir="run"))
        assert node.agents() == [trainer.client.agent_pid]
        assert node.trainer(root).client.agent_pid == trainer.client.agent_pid
    finally:
        node.close()


def test_without_a_setting_all_processes_of_a_user_find_one_place(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "_TEMPORARY", tmp_path)
    ensure(str(root))
    found = place_of(str(root), None)
    # The identity of the directory is new, so no agent of this machine has the name.
    made = AgentSocket(found)
    made.listen()
    try:
        listener = found.listener()
        assert listener == (os.getpid(), os.getuid())
        sockets = Path("/proc/net/unix").read_text(errors="replace")
        names = [line.split()[-1] for line in sockets.splitlines()]
        assert str(found) in names
        assert found.log.parent == tmp_path / f"flashckpt-{os.getuid()}"
    finally:
        made.leave(keep_log=False)
    assert found.listener() is None


def test_a_place_has_one_agent(tmp_path: Path) -> None:
    first = AgentSocket(place_in(tmp_path))
    with pytest.raises(PlaceTakenError):
        AgentSocket(place_in(tmp_path))
    AgentSocket(place_in(tmp_path / "other")).leave(keep_log=False)
    first.leave(keep_log=False)


def test_an_agent_moves_with_its_directory_unless_another_serves_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = place_in(tmp_path)
    there = here._replace(key=f"{here.key.partition('-')[0]}-{'0' * 16}")
    moving, other = AgentSocket(here), AgentSocket(there)
    moving.listen()
    os.close(here.open_log())
    for _ in range(3):
        moving.follow(there.key)
    assert moving.place == here
    assert here.listener() is not None
    assert [record.levelname for record in caplog.records] == ["ERROR"], "not again and again"
    assert there.agents_elsewhere() == [os.getpid()]
    other.leave(keep_log=True)
    moving.follow(there.key)
    assert (here.listener(), moving.place) == (None, there)
    assert there.listener() is not None
    assert list(tmp_path.glob("*.log")) == [there.log]
    moving.leave(keep_log=False)
    assert list(tmp_path.glob("*.log")) == []


def test_another_network_namespace_has_its_own_agent(node: Node, root: Path) -> None:
    """As a container without the network of the node. Both agents serve, each its own ranks."""
    apart = ("unshare", "--net")
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no network namespaces")
    trainer = node.trainer(root, 0, 2)
    save_id = new_save_id()
    other = node.process(
        root, rank=1, world_size=2, iterations=[1], save_id=save_id, stop="staged", inside=apart
    )
    assert other.stopped() != trainer.client.agent_pid
    trainer.stage(1, save_id)
    assert trainer.outcome().error is None


# ---------------------------------------------------------------------- another user


@contextmanager
def another_user(place: Place, *, listens: bool) -> Iterator[None]:
    """Let user 65534 have the name of `place`."""
    name, ready, release = place.name, os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        taken = socket.socket(socket.AF_UNIX)
        taken.bind(name)
        if listens:
            taken.listen()
        os.write(ready[1], b"!")
        os.close(release[1])
        os.read(release[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"!"
        yield
    finally:
        os.close(release[1])
        os.waitpid(child, 0)
        for fd in (*ready, release[0]):
            os.close(fd)


@as_root
def test_a_user_who_takes_the_name_first_is_named_with_the_remedy(node: Node, root: Path) -> None:
    place = node.place(root)
    with another_user(place, listens=True):
        with pytest.raises(AgentError, match=f"{place}: user {NOBODY} has taken .*'runtime_dir'"):
            node.trainer(root)
        elsewhere = Node(node.runtime_dir.with_name("elsewhere"))
        try:
            assert elsewhere.trainer(root).save(1).error is None
        finally:
            elsewhere.close()
    assert node.trainer(root).save(2).error is None


@as_root
def test_a_name_that_is_taken_and_silent_ends_the_wait(node: Node, root: Path) -> None:
    with (
        another_user(node.place(root), listens=False),
        pytest.raises(AgentError, match=r"no agent answered at .*@flashckpt-0-.*'runtime_dir'"),
    ):
        node.trainer(root, config=node.config(start_timeout_s=0.5))


@as_root
def test_a_name_that_another_user_has_at_the_same_path_stops_no_start(
    node: Node, root: Path
) -> None:
    """A start looks for agents that served another directory at its path."""
    place = node.place(root)
    other = place._replace(key=f"{place.key.partition('-')[0]}-{'0' * 16}")
    with another_user(other, listens=True), socket.socket(socket.AF_UNIX) as strange:
        strange.bind(place.name[:20] + b"\xff\n\0")
        assert node.trainer(root).save(1).error is None
