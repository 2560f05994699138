"""Encrypted, authenticated connections between the agents of one job: ZeroMQ with CURVE.

Every agent has a key pair of its own. A connecting agent must prove that its key is on the job's
list. The other side must prove that it has the key that the list names. All bytes are encrypted and
authenticated (CurveZMQ, https://rfc.zeromq.org/spec/26).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
import zmq
from zmq.utils import z85

from megatron_flashckpt.agent.peers import messages as m
from megatron_flashckpt.agent.protocol import Identity, PeerNode
from megatron_flashckpt.errors import AgentError

logger = logging.getLogger(__name__)

#: Requests in flight on one connection: with 4 MiB each they hide the round trip, and bound the
#: memory of both sides.
_WINDOW = 4
_TICK_MS = 200
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"flashckpt"
_KEY_NBYTES = 32

Handler = Callable[[m.Request, memoryview], tuple[m.Reply, bytes]]


class PeerError(AgentError):
    """The agent of another node is gone, too slow, or has declined."""


def new_identity() -> Identity:
    """Return a fresh key pair."""
    public, secret = zmq.curve_keypair()
    return Identity(public.decode(), secret.decode())


def new_context(io_threads: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context whose I/O threads encrypt and decrypt: about 0.5 GB/s each."""
    return zmq.Context(io_threads=io_threads)


def endpoint(host: str, port: int | str) -> str:
    """Return the ZeroMQ address of a TCP address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _key(text: str) -> bytes:
    """Return a key as ZeroMQ takes it.

    Raises:
        AgentError: `text` is not a key.
    """
    with contextlib.suppress(ValueError, KeyError):  # of another length; another character
        if len(z85.decode(text.encode())) == _KEY_NBYTES:
            return text.encode()
    raise AgentError(f"{len(text)} characters that are not a CURVE key (40 characters of Z85)")


class PeerServer:
    """Answers the agents of other nodes, in a thread. `allowed` may be replaced at any time."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int | None,
        identity: Identity,
        handler: Handler,
    ) -> None:
        """Listen on `host` (an address of this node), on a free port or on `port`.

        Raises:
            AgentError: the address is not one of this node, the port is taken, or `identity` has no
                valid keys. Then nothing stays open.
        """
        self.allowed: frozenset[str] = frozenset()
        self._handler = handler
        self._closing = False
        with contextlib.ExitStack() as opened:
            # The key checker must be bound before any agent can connect.
            self._zap = context.socket(zmq.REP)
            opened.callback(self._zap.close)
            self._zap.linger = 0
            self._zap.bind(_ZAP)
            self._socket = context.socket(zmq.ROUTER)
            opened.callback(self._socket.close)
            self._socket.linger = 0
            self._socket.curve_server = True
            self._socket.curve_publickey = _key(identity.public)
            self._socket.curve_secretkey = _key(identity.secret)
            self._socket.zap_domain = _DOMAIN
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self._socket.maxmsgsize = m.MAX_FRAME_NBYTES
            self._socket.heartbeat_ivl = 5000
            self._socket.ipv6 = ":" in host
            try:
                self._socket.bind(endpoint(host, port or "*"))
            except zmq.ZMQError as error:
                raise AgentError(
                    f"cannot listen on {host} ({error}); set 'agent.address' to an address of this "
                    "node that the other nodes reach"
                ) from error
            opened.pop_all()
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.port = int(bound.decode().rpartition(":")[2].rstrip("\0"))
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(_TICK_MS))
            if self._zap in ready:
                self._check_key()
            if self._socket in ready:
                self._answer()
        self._socket.close()
        self._zap.close()

    def _check_key(self) -> None:
        """Answer ZeroMQ whether a key belongs to this job (ZAP, https://rfc.zeromq.org/spec/27)."""
        version, number, _, address, _, mechanism, *credentials = self._zap.recv_multipart()
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
        if key in self.allowed:
            self._zap.send_multipart([version, number, b"200", b"", key.encode(), b""])
            return
        host = address.decode(errors="replace")
        logger.warning("refused a connection from %s: its key is not of this job", host)
        self._zap.send_multipart([version, number, b"400", b"not of this job", b"", b""])

    def _answer(self) -> None:
        frames = self._socket.recv_multipart(copy=False)
        if len(frames) != 4:
            return
        sender, number, header, payload = frames
        # A connection may be older than the current list.
        if header.get("User-Id") not in self.allowed:
            return
        reply: m.Reply
        try:
            reply, body = self._handler(m.decode_request(header.bytes), payload.buffer)
        except msgspec.MsgspecError as error:
            reply, body = m.Declined(f"not understood: {error}"), b""
        except Exception as error:  # the thread must continue for other nodes
            logger.exception("a request of another node failed")
            reply, body = m.Declined(f"{type(error).__name__}: {error}"), b""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([sender.bytes, number.bytes, m.encode(reply), body])


class Connection:
    """Connection to one node's agent, for one thread. A context manager."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        identity: Identity,
        node: PeerNode,
        timeout_s: float,
    ) -> None:
        """Begin to connect.

        Raises:
            AgentError: a key is not valid, or `node` has no valid address.
        """
        self._place = f"{node.host}:{node.port}"
        self._timeout_s = timeout_s
        self._next = 0
        self._given_up = False
        server_key, public, secret = map(_key, (node.public, identity.public, identity.secret))
        with contextlib.ExitStack() as opened:
            self._socket = context.socket(zmq.DEALER)
            opened.callback(self._socket.close)
            self._socket.linger = 0
            self._socket.curve_serverkey = server_key
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
            self._socket.maxmsgsize = m.MAX_FRAME_NBYTES
            self._socket.sndtimeo = int(timeout_s * 1000)
            self._socket.ipv6 = ":" in node.host
            try:
                self._socket.connect(endpoint(node.host, node.port))
            except zmq.ZMQError as error:
                raise PeerError(f"{self._place}: {error}") from error
            opened.pop_all()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def give_up(self) -> None:
        """End the wait of the thread that waits for an answer. May be called by any thread."""
        self._given_up = True

    def ask(self, request: m.Request, payload: bytes = b"") -> tuple[m.Reply, memoryview]:
        """Return the reply, of any type.

        Raises:
            PeerError: no answer in time.
        """
        (answer,) = self.pipeline([(request, payload)])
        return answer

    def pipeline(
        self, requests: Iterable[tuple[m.Request, bytes]]
    ) -> Iterator[tuple[m.Reply, memoryview]]:
        """Yield the replies in order; a few requests are sent before the first reply is read.

        Raises:
            PeerError: no answer in time; close the connection.
        """
        waiting: collections.deque[bytes] = collections.deque()
        for request, payload in requests:
            number = self._next.to_bytes(8, "little")
            self._next += 1
            try:
                self._socket.send_multipart([number, m.encode(request), payload], copy=False)
            except zmq.Again as error:  # the peer takes no request, as one that has refused us
                raise self._no_answer() from error
            except zmq.ZMQError as error:
                raise PeerError(f"{self._place}: {error}") from error
            waiting.append(number)
            if len(waiting) == _WINDOW:
                yield self._receive(waiting.popleft())
        while waiting:
            yield self._receive(waiting.popleft())

    def _no_answer(self) -> PeerError:
        return PeerError(f"{self._place}: no answer within {self._timeout_s:.0f} s")

    def _receive(self, expected: bytes) -> tuple[m.Reply, memoryview]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            if not self._socket.poll(_TICK_MS):
                if self._given_up:
                    raise PeerError(f"{self._place}: given up")
                if time.monotonic() > deadline:
                    raise self._no_answer()
                continue
            number, header, payload = self._socket.recv_multipart(copy=False)
            # Skip answers to abandoned requests.
            if number.bytes == expected:
                return m.decode_reply(header.bytes), payload.buffer
