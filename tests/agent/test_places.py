"""The runtime directory of a user: all processes on a node find the same one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.agent import socket_dir
from megatron_flashckpt.agent.socket_dir import SOCKET, agent_directory, holder
from megatron_flashckpt.config import AgentConfig, Config
from tests.agent.test_socket_dir import NOBODY, as_root, run_as_nobody
from tests.support.trainer import FakeTrainer, eventually, is_alive

ROOT = "/some/save"
NAME = f"flashckpt-{os.getuid()}"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose `tmp` replaces /tmp; all users may write there."""
    path = Path(tempfile.mkdtemp(prefix="fc-test-"))
    path.chmod(0o755)
    (path / "tmp").mkdir()
    (path / "tmp").chmod(0o1777)
    monkeypatch.setattr(socket_dir, "_TEMPORARY", path / "tmp")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def session(machine: Path) -> Path:
    """The runtime directory of a login session."""
    path = machine / "session"
    path.mkdir(mode=0o700)
    return path


def directory_of_agent(session: Path | None = None) -> Path:
    """Return the directory that a process finds, with or without the variable of a session."""
    with pytest.MonkeyPatch.context() as patched:
        if session is not None:
            patched.setenv("XDG_RUNTIME_DIR", str(session))
        return agent_directory(ROOT, None)


def test_processes_without_the_variable_also_find_the_session_directory(
    machine: Path, session: Path
) -> None:
    place = directory_of_agent(session)
    assert place.parent == session / "flashckpt"
    assert place.stat().st_mode & 0o777 == 0o700
    assert directory_of_agent() == directory_of_agent(session) == place
    other = machine / "another session"
    other.mkdir(mode=0o700)
    assert directory_of_agent(other) == place


def test_processes_with_the_variable_find_a_place_chosen_without_it(
    machine: Path, session: Path
) -> None:
    place = directory_of_agent()
    assert place.parent == machine / "tmp" / NAME
    assert directory_of_agent(session) == place
    assert list(session.iterdir()) == []


def test_processes_find_another_place_when_the_session_has_ended(
    machine: Path, session: Path
) -> None:
    place = directory_of_agent(session)
    shutil.rmtree(session)
    assert (
        directory_of_agent(session) == directory_of_agent() == machine / "tmp" / NAME / place.name
    )
    session.mkdir(mode=0o700)
    assert directory_of_agent(session) == directory_of_agent()


def open_to_others(session: Path) -> Path:
    session.chmod(0o755)
    return session


def of_another_user(session: Path) -> Path:
    os.chown(session, NOBODY, -1)
    return session


def a_link(session: Path) -> Path:
    session.with_name("link").symlink_to(session)
    return session.with_name("link")


def too_long(session: Path) -> Path:
    path = session / ("x" * 80)
    path.mkdir(mode=0o700)
    return path


def a_file(session: Path) -> Path:
    (session / "file").touch()
    return session / "file"


def with_another_users_directory_in_it(session: Path) -> Path:
    (session / "flashckpt").mkdir(mode=0o700)
    os.chown(session / "flashckpt", NOBODY, -1)
    return session


@as_root
@pytest.mark.parametrize(
    "make",
    [
        open_to_others,
        of_another_user,
        a_link,
        too_long,
        a_file,
        with_another_users_directory_in_it,
        lambda session: session / "nowhere",
        lambda session: Path("relative"),
    ],
)
def test_a_runtime_directory_that_is_not_private_is_skipped(
    machine: Path, session: Path, make: Callable[[Path], Path]
) -> None:
    place = directory_of_agent(make(session))
    assert place == directory_of_agent() == machine / "tmp" / NAME / place.name


def occupy(path: Path) -> str:
    path.mkdir(mode=0o777)
    return "done"


def occupy_by_link(path: Path) -> str:
    path.symlink_to("/tmp")
    return "done"


def occupy_by_file(path: Path) -> str:
    path.touch()
    return "done"


@as_root
@pytest.mark.parametrize("how", [occupy, occupy_by_link, occupy_by_file])
def test_another_user_cannot_block_us_by_taking_our_name(
    machine: Path, session: Path, how: Callable[[Path], str]
) -> None:
    usual = machine / "tmp" / NAME
    assert run_as_nobody(lambda: how(usual)) == "done"
    place = directory_of_agent()
    assert place.parent.name.startswith(f"{NAME}-")
    assert place.parent.stat().st_uid == os.getuid()
    assert place.stat().st_mode & 0o777 == 0o700
    decoy = machine / "tmp" / f"{NAME}-{0:016x}-00000000"  # this name sorts before ours
    assert run_as_nobody(lambda: occupy(decoy)) == "done"
    assert directory_of_agent() == directory_of_agent(session) == place
    # The usual name is free again; the running processes keep their place.
    (shutil.rmtree if usual.is_dir() and not usual.is_symlink() else os.unlink)(usual)
    assert directory_of_agent() == place
    assert len(os.fsencode(place / SOCKET)) - len(os.fsencode(machine / "tmp")) < 80


@as_root
def test_simultaneous_processes_agree_on_a_place_if_the_name_is_taken(
    machine: Path, session: Path
) -> None:
    assert run_as_nobody(lambda: occupy(machine / "tmp" / NAME)) == "done"
    ready, start = os.pipe()
    readers = []
    for number in range(12):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(start)
            os.read(ready, 1)  # all processes begin when the other end is closed
            try:
                answer = str(directory_of_agent(session if number % 2 else None))
            except BaseException as error:
                answer = repr(error)
            os.write(writer, answer.encode())
            os._exit(0)
        os.close(writer)
        readers.append((child, reader))
    os.close(ready)
    os.close(start)
    places = set()
    for child, reader in readers:
        with open(reader) as stream:
            places.add(stream.read())
        os.waitpid(child, 0)
    assert places == {str(directory_of_agent())}, "a later process finds the same place"


@as_root
def test_a_process_waits_for_a_held_lock_only_for_a_limited_time(
    machine: Path, session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = machine / "tmp" / NAME
    assert run_as_nobody(lambda: occupy(usual)) == "done"
    fd = os.open(usual.parent, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    others: list[Path] = []

    def sleep(_: float) -> None:
        """Make the base directory, as another process of this user that holds the lock."""
        if not others:
            others.append(usual.with_name(f"{NAME}-{1:016x}-00000000"))
            others[0].mkdir(mode=0o700)
            fcntl.flock(fd, fcntl.LOCK_UN)

    with monkeypatch.context() as patched:
        patched.setattr(socket_dir.time, "sleep", sleep)
        assert directory_of_agent().parent == others[0]
    shutil.rmtree(others[0])
    fcntl.flock(fd, fcntl.LOCK_EX)
    monkeypatch.setattr(socket_dir, "_LOCK_S", 0.05)
    assert directory_of_agent().parent.parent == usual.parent
    os.close(fd)


def test_a_process_follows_a_link_that_another_one_has_just_made(
    machine: Path, session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, looks = socket_dir._entered, []

    def look(entry: Path) -> Path | None:
        looks.append(entry)
        return None if len(looks) == 1 else entered(entry)  # the link does not exist yet

    place = directory_of_agent(session)
    monkeypatch.setattr(socket_dir, "_entered", look)
    assert directory_of_agent() == place
    assert len(looks) == 2


def test_an_agent_moves_with_its_memory_when_its_session_ends(
    machine: Path, session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is real and uses the real /tmp."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    root = machine / "save"
    config = Config(agent=AgentConfig(grace_s=60.0, start_timeout_s=60.0))
    trainer = FakeTrainer(root, config)
    agent = trainer.client.agent_pid
    place = agent_directory(str(root), None)
    try:
        assert place.parent == session / "flashckpt"
        assert trainer.keep(1).error is None
        shutil.rmtree(session)
        trainer.hang_up()
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        # A trainer that connected within this second would start another agent.
        eventually(
            "the agent holds its new directory",
            lambda: holder(agent_directory(str(root), None)) == agent,
        )
        again = FakeTrainer(root, config)
        assert again.client.agent_pid == agent
        assert [offer.iteration for offer in again.take()] == [1]
        assert again.save(2).error is None
        moved = agent_directory(str(root), None)
        assert moved != place
        again.hang_up(leave=True)
        eventually("the end of the agent", lambda: not is_alive(agent))
        assert not os.path.lexists(moved), "the moved directory is removed"
    finally:
        if is_alive(agent):
            os.kill(agent, 9)
