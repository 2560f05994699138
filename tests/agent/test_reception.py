"""Errors of connections: the agent survives them all, because it may hold the only checkpoint."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from megatron_flashckpt.agent.place import Place
from megatron_flashckpt.agent.reception import MOST_SILENT, Acceptor, SilentConnections
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.memory.slab import Slab
from tests.agent.conftest import Node
from tests.support.processes import open_files, sockets_of, thread_count
from tests.support.trainer import FakeTrainer, content, eventually, is_alive

PATIENCE_S = 60.0


class ConnectionFlood:
    """Connections to an agent under control of the test, which closes them at its end."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.sockets: list[socket.socket] = []

    def open_connections(self, count: int = 1, send: bytes = b"") -> None:
        for _ in range(count):
            sock = socket.socket(socket.AF_UNIX)
            self.sockets.append(sock)
            self._place.connect(sock)  # a timeout would fail the call on a full queue
            sock.settimeout(PATIENCE_S)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(send)

    def is_hung_up(self, number: int) -> bool:
        """Wait until the agent ends a connection; return whether it did."""
        try:
            return self.sockets[number].recv(1) == b""
        except ConnectionResetError:  # the agent left some bytes unread
            return True

    def close_connections(self) -> None:
        while self.sockets:
            self.sockets.pop().close()


@pytest.fixture
def trainer(node: Node, root: Path) -> FakeTrainer:
    return node.trainer(root)


@pytest.fixture
def crowd(node: Node, root: Path, trainer: FakeTrainer) -> Iterator[ConnectionFlood]:
    made = ConnectionFlood(node.place(root))
    yield made
    made.close_connections()


def limit_files(pid: int, count: int) -> None:
    """Limit the number of open files of a process; its open files stay open."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, hard))


def test_memory_of_dead_trainers_survives_a_flood_of_connections(
    node: Node, root: Path, trainer: FakeTrainer, crowd: ConnectionFlood
) -> None:
    agent = trainer.client.agent_pid
    assert trainer.keep(1).error is None
    data = content(0, 1, trainer.layout.nbytes)
    trainer.hang_up()
    eventually("the end of the connection", lambda: agent_connections(agent) == 0)
    limit_files(agent, len(open_files(agent)) + 4)
    crowd.open_connections(100)
    for number in range(90):
        assert crowd.is_hung_up(number)
    assert is_alive(agent)
    log = node.log(root).read_text()
    assert "Too many open files" in log
    assert log.count("refused ") < 5, "a flood of connections does not fill the log"
    again = node.trainer(root)  # the last connections of the crowd are still open
    assert again.client.agent_pid == agent
    assert [offer.iteration for offer in again.take()] == [1]
    assert data in (again.bytes_in(0), again.bytes_in(1))
    limit_files(agent, 1024)
    assert again.save(2).error is None


def agent_connections(pid: int) -> int:
    # The listening socket is one of these descriptors.
    return len(sockets_of(pid)) - 1


def test_a_rank_learns_that_a_lack_of_descriptors_refused_its_slab(
    node: Node, root: Path, trainer: FakeTrainer
) -> None:
    agent = trainer.client.agent_pid
    slab = Slab.create(2, 4096, 4096, "0")
    limit_files(agent, len(open_files(agent)))
    with pytest.raises(AgentError, match=r"may open \d+ files; raise its limit"):
        trainer.client.attach(slab)
    limit_files(agent, 1024)
    assert trainer.client.attach(slab) == (), "the connection still works"
    slab.close()


def test_a_rank_without_descriptors_says_so_and_loses_nothing(node: Node, root: Path) -> None:
    """Before, training stopped with an error that is none of this package.

    The slab is passed as a descriptor; without the slab the job would load from storage.
    """
    trainer = node.trainer(root)
    assert trainer.save(1).error is None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        for request in (trainer.client.take, lambda: node.trainer(root, 1)):
            with pytest.raises(AgentError, match=r"this process may open 3 files.*'ulimit -n'"):
                request()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [offer.iteration for offer in trainer.take()] == [1]
    assert node.trainer(root, 1).client.poll().pending == 0


def test_an_agent_may_open_as_many_files_as_its_hard_limit_allows(node: Node, root: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        agent = node.trainer(root).client.agent_pid
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(agent, resource.RLIMIT_NOFILE) == (min(hard, 2**16), hard)


def test_an_agent_limits_silent_connections_and_still_serves_ranks(
    node: Node, root: Path, trainer: FakeTrainer, crowd: ConnectionFlood
) -> None:
    agent = trainer.client.agent_pid
    assert trainer.save(1).error is None
    threads, connections = thread_count(agent), agent_connections(agent)
    crowd.open_connections(MOST_SILENT + 100)
    for number in range(100):
        assert crowd.is_hung_up(number), "the agent ends the oldest connections first"
    log = node.log(root).read_text()
    assert f"more than {MOST_SILENT} connections send no greeting" in log
    eventually("few threads", lambda: thread_count(agent) <= threads + MOST_SILENT)
    eventually("few sockets", lambda: agent_connections(agent) <= connections + MOST_SILENT)
    other = node.trainer(root, 1, 2)
    assert other.client.agent_pid == agent
    assert trainer.save(2).error is None
    crowd.close_connections()
    eventually("as many threads as before", lambda: thread_count(agent) <= threads + 1)


def test_an_agent_ends_a_silent_connection_after_a_timeout(
    node: Node, root: Path, trainer: FakeTrainer, crowd: ConnectionFlood
) -> None:
    crowd.open_connections(1)
    crowd.open_connections(1, b"\x14")
    assert crowd.is_hung_up(0)
    assert crowd.is_hung_up(1)
    assert trainer.save(1).error is None, "a connection after its greeting may stay silent"


def test_no_error_of_accept_ends_the_agent() -> None:
    numbers = errno.ECONNABORTED, errno.ENOMEM, errno.ENOBUFS, errno.ENFILE, errno.EPERM
    listener = mock.Mock()
    # If a process is short of something, the listener is asked once more.
    listener.accept.side_effect = [OSError(number, "") for number in numbers for _ in range(2)]
    reception = Acceptor(SilentConnections())
    while listener.accept.call_count < 2 * len(numbers):
        assert reception.accept(listener, 0.001) is None
