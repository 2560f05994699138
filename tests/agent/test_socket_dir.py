"""The private socket directory: other users can neither enter nor prepare it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.agent import frames
from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.connecting import connect
from megatron_flashckpt.agent.save_directory import ensure
from megatron_flashckpt.agent.socket_dir import SOCKET, agent_directory, private_directory
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError
from tests.agent.conftest import Node
from tests.support.trainer import config_of

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        made = agent_directory("/some/save", str(tmp_path / "run"))
    finally:
        os.umask(former)
    assert made.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert agent_directory("/some/save", str(tmp_path / "run")) == made
    assert agent_directory("/some/other", str(tmp_path / "run")) != made


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o770, 0o701, 0o777, 0o720])
def test_a_directory_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(AgentError, match=rf"other users can reach it \(mode 0{mode:o}\)") as raised:
        agent_directory("/some/save", str(path))
    assert f"chmod 700 {path}" in str(raised.value)


def test_the_directory_of_one_agent_is_checked_too(tmp_path: Path) -> None:
    ensure(root := str(tmp_path / "save"))
    made = agent_directory(root, str(tmp_path / "run"))
    made.chmod(0o777)
    with pytest.raises(AgentError, match="other users can reach it"):
        connect(root, 0, 0, config_of(tmp_path / "run"))


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    private_directory(tmp_path / "real")
    (tmp_path / "run").symlink_to(tmp_path / "real")
    with pytest.raises(AgentError, match="is not a directory of user"):
        agent_directory("/some/save", str(tmp_path / "run"))


def test_a_dangling_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "nowhere")
    with pytest.raises(AgentError, match="is not a directory of user"):
        agent_directory("/some/save", str(tmp_path / "run"))
    assert not (tmp_path / "nowhere").exists()


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(AgentError, match="is not a directory of user"):
        agent_directory("/some/save", str(tmp_path / "run"))


def test_a_place_where_no_directory_can_be_made_is_named() -> None:
    with (
        tempfile.NamedTemporaryFile() as file,  # a short name, because its length is checked first
        pytest.raises(AgentError, match=r"cannot be created .*'runtime_dir'"),
    ):
        agent_directory("/some/save", f"{file.name}/run")


@as_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    made = private_directory(tmp_path / "run")
    os.chown(made, NOBODY, -1)
    with pytest.raises(AgentError, match=rf"{made}: is not a directory of user 0"):
        agent_directory("/some/save", str(tmp_path / "run"))


def test_a_path_too_long_for_a_socket_is_named_with_the_remedy(tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 60) / ("b" * 60)
    with pytest.raises(AgentError, match=r"too long for a socket.*'runtime_dir'"):
        connect(str(tmp_path / "save"), 0, 0, config_of(deep))


def test_a_relative_runtime_dir_starts_at_the_directory_of_the_rank(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    node = Node(tmp_path / "run")
    try:
        trainer = node.trainer(root, config=Config(runtime_dir="run"))
        assert node.agents() == [trainer.client.agent_pid]
    finally:
        node.close()


# ---------------------------------------------------------------------- another user


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that any user can enter, unlike the directories of pytest."""
    path = Path(tempfile.mkdtemp(prefix="fc-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def run_as_nobody(action: Callable[[], str], before: Callable[[], object] = lambda: None) -> str:
    """Return the result of `action` in a process of user 65534; `before` still runs as root."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            before()
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            output = action()
        except BaseException as error:
            output = type(error).__name__
        os.write(writer, output.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as stream:
        output = stream.read()
    os.waitpid(child, 0)
    return output


def say_hello(path: Path) -> str:
    """Connect to the agent; return the name of its reply or of the error."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10.0)
        sock.connect(str(path))
        try:
            frames.send(sock, p.Hello(0, p.PROTOCOL_VERSION))
            return type(p.decode_reply(frames.receive(sock)[0])).__name__
        except (EOFError, ConnectionError):
            return "hung up on"


@as_root
def test_another_user_does_not_reach_the_socket(reachable: Path) -> None:
    node = Node(reachable / "run")
    try:
        trainer = node.trainer(reachable / "save")
        path = node.directory(reachable / "save") / SOCKET
        assert path.exists()
        assert say_hello(path) == "Welcome", "the probe reaches the agent"
        assert run_as_nobody(lambda: say_hello(path)) == "PermissionError"
        assert run_as_nobody(lambda: str(os.listdir(path.parent))) == "PermissionError"
        assert trainer.save(1).error is None
    finally:
        node.close()


@as_root
def test_an_agent_rejects_another_user_even_if_the_directory_is_open(
    reachable: Path,
) -> None:
    node = Node(reachable / "run")
    try:
        trainer = node.trainer(reachable / "save")
        path = node.directory(reachable / "save") / SOCKET
        path.chmod(0o666)
        path.parent.chmod(0o755)
        path.parent.parent.chmod(0o755)
        assert run_as_nobody(lambda: say_hello(path)) == "hung up on"
        assert trainer.save(1).error is None
    finally:
        (reachable / "run").chmod(0o700)
        node.close()


@as_root
def test_a_rank_does_not_talk_to_an_agent_of_another_user(tmp_path: Path) -> None:
    ensure(root := str(tmp_path / "save"))
    path = agent_directory(root, str(tmp_path / "run")) / SOCKET
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    ready, release = os.pipe(), os.pipe()

    def serve() -> str:
        # The kernel reports the user that called listen().
        listener.listen()
        os.write(ready[1], b"!")
        os.read(release[0], 1)
        return ""

    child = os.fork()
    if child == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        serve()
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"!"
        config = Config(runtime_dir=str(tmp_path / "run"))
        with pytest.raises(AgentError, match=f"belongs to user {NOBODY}"):
            connect(root, 0, 0, config)
    finally:
        os.write(release[1], b"!")
        os.waitpid(child, 0)
        listener.close()
        for fd in (*ready, *release):
            os.close(fd)
