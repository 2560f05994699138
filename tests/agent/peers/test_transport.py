"""Connections between agents: encrypted, limited to the keys of the job, and bounded in time."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from megatron_flashckpt.agent.peers import messages as m
from megatron_flashckpt.agent.peers.transport import (
    Connection,
    PeerError,
    PeerServer,
    new_context,
    new_identity,
)
from megatron_flashckpt.agent.protocol import Identity, PeerNode
from megatron_flashckpt.errors import AgentError

SECRET = bytes(range(256)) * 64
#: Long enough for an answer that arrives; the tests wait as long for answers that must not.
PATIENCE_S = 1.0


class RecordingServer:
    """A server that sends `SECRET` to every admitted peer, and records its requests."""

    def __init__(self) -> None:
        self.identity, self.friend = new_identity(), new_identity()
        self.context = new_context(1)
        self.asked: list[m.Request] = []
        self.received: list[bytes] = []
        self.server = PeerServer(self.context, "127.0.0.1", None, self.identity, self._answer)
        self.server.allowed = frozenset([self.friend.public])

    def _answer(self, request: m.Request, payload: memoryview) -> tuple[m.Reply, bytes]:
        self.asked.append(request)
        self.received.append(bytes(payload))
        return m.Taken(), SECRET

    def node(self, public: str | None = None) -> PeerNode:
        return PeerNode("127.0.0.1", self.server.port, public or self.identity.public, (0,))

    @contextlib.contextmanager
    def connection(
        self, identity: Identity | None = None, node: PeerNode | None = None
    ) -> Iterator[Connection]:
        context = new_context(1)
        made = Connection(context, identity or self.friend, node or self.node(), PATIENCE_S)
        try:
            yield made
        finally:
            made.close()
            context.term()


@pytest.fixture
def served() -> Iterator[RecordingServer]:
    made = RecordingServer()
    yield made
    made.server.close()
    made.context.term()


def assert_serves_admitted_peers(served: RecordingServer) -> None:
    with served.connection() as connection:
        reply, payload = connection.ask(m.Find(0))
        assert (reply, bytes(payload)) == (m.Taken(), SECRET)


def test_a_peer_with_an_unknown_key_gets_no_answer(
    served: RecordingServer, caplog: pytest.LogCaptureFixture
) -> None:
    with served.connection(new_identity()) as connection, pytest.raises(PeerError, match="answer"):
        connection.ask(m.Find(7))
    assert served.asked == []
    assert "refused a connection from 127.0.0.1: its key is not of this job" in caplog.text
    assert_serves_admitted_peers(served)


@pytest.mark.parametrize("mechanism", ["null", "plain"])
def test_a_peer_without_encryption_gets_no_answer(served: RecordingServer, mechanism: str) -> None:
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.linger = 0
    if mechanism == "plain":
        sock.plain_username, sock.plain_password = b"agent", b"agent"
    sock.connect(f"tcp://127.0.0.1:{served.server.port}")
    sock.send_multipart([b"12345678", m.encode(m.Find(7)), b""])
    assert sock.poll(1000 * PATIENCE_S) == 0
    assert served.asked == []
    sock.close()
    context.term()
    assert_serves_admitted_peers(served)


def test_a_server_with_the_wrong_key_gets_no_request(served: RecordingServer) -> None:
    """The address is right and the key is not: a stolen address must not get checkpoints."""
    node = served.node(public=new_identity().public)
    with served.connection(node=node) as connection, pytest.raises(PeerError, match="answer"):
        connection.ask(m.Find(7), SECRET)
    assert served.received == []


def test_a_node_removed_from_the_list_gets_no_further_answer(served: RecordingServer) -> None:
    """This also holds for a connection that was open before."""
    with served.connection() as connection:
        connection.ask(m.Find(0))
        served.server.allowed = frozenset()
        with pytest.raises(PeerError, match="answer"):
            connection.ask(m.Find(7))
    assert served.asked == [m.Find(0)]


def test_garbage_on_the_port_does_not_disturb_other_connections(served: RecordingServer) -> None:
    for garbage in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(65536), b"\xff" + b"\0" * 100, b""):
        with socket.create_connection(("127.0.0.1", served.server.port)) as sock:
            sock.sendall(garbage)
    assert_serves_admitted_peers(served)


def test_a_malformed_request_is_declined_and_the_next_is_answered(served: RecordingServer) -> None:
    with served.connection() as connection:
        sock = connection._socket
        for frames in ([b"x"], [b"1", b"2", b"3", b"4"], [b"12345678", b"\xc1", b""]):
            sock.send_multipart(frames)
        reply, _ = connection.ask(m.Find(0))
        assert reply == m.Taken()
    assert served.asked == [m.Find(0)]


def test_a_failing_handler_answers_with_its_error(
    served: RecordingServer, caplog: pytest.LogCaptureFixture
) -> None:
    served.server._handler = lambda request, payload: 1 // 0
    with served.connection() as connection:
        reply, _ = connection.ask(m.Find(0))
    assert reply == m.Declined("ZeroDivisionError: integer division or modulo by zero")
    assert caplog.records[-1].levelno == logging.ERROR


def test_many_requests_are_answered_in_order(served: RecordingServer) -> None:
    with served.connection() as connection:
        requests = [(m.Find(rank), rank.to_bytes(4, "little")) for rank in range(100)]
        assert len(list(connection.pipeline(requests))) == 100
    assert served.asked == [request for request, _ in requests]
    assert served.received == [payload for _, payload in requests]


def test_an_address_of_another_machine_is_refused_with_the_setting_to_change() -> None:
    context = new_context(1)
    with pytest.raises(AgentError, match=r"cannot listen on 192\.0\.2\.1 .*set 'agent\.address'"):
        PeerServer(context, "192.0.2.1", None, new_identity(), lambda *_: (m.Taken(), b""))
    context.term()


def test_a_caller_can_cancel_the_wait_for_an_answer(served: RecordingServer) -> None:
    with served.connection(node=PeerNode("127.0.0.1", 1, served.identity.public, ())) as asking:
        asking._timeout_s = 60.0
        threading.Timer(0.2, asking.give_up).start()
        started = time.monotonic()
        with pytest.raises(PeerError, match="given up"):
            asking.ask(m.Find(0))
        assert time.monotonic() - started < 30.0
