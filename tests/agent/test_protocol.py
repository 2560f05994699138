"""Frames and descriptors: messages arrive, and garbage harms only the connection that sent it."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flashckpt.agent import frames
from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotState
from tests.agent.conftest import Node
from tests.support.processes import nothing_left_open, open_files
from tests.support.stored import assert_intact
from tests.support.trainer import FakeTrainer, eventually, new_save_id

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield left, right
    left.close()
    right.close()


def open_fds(pid: int, save_dir: Path) -> list[str]:
    """Return the open descriptors of an agent, without files in `save_dir`.

    An agent tidies its save directory after it has reported a result, so its descriptors there
    change at any time.
    """
    return sorted(target for target in open_files(pid) if not target.startswith(f"{save_dir}/"))


# ---------------------------------------------------------------------- frames

_words = st.text(max_size=40)
_messages = st.one_of(
    st.builds(p.Hello, st.integers(0, 2**31), st.integers(0, 2**31)),
    st.builds(p.Acquire, st.floats(0, 1e9)),
    st.builds(p.PutTemplate, _words, st.binary(max_size=3000)),
    st.builds(p.Staged, st.integers(0, 2**31)),
    st.sampled_from([p.Poll(), p.Leave(), p.TakeSlab(), p.AttachSlab()]),
)


@given(messages=st.lists(_messages, max_size=5))
def test_requests_arrive_complete_and_in_order(messages: list[p.Request]) -> None:
    left, right = socket.socketpair()
    with left, right:
        for message in messages:
            frames.send(left, message)
        left.close()
        for message in messages:
            body, fd = frames.receive(right)
            assert p.decode_request(body) == message
            assert fd is None
        with pytest.raises(EOFError):
            frames.receive(right)


@pytest.mark.parametrize("timeout_s", [None, 60.0], ids=["agent", "trainer"])
def test_a_frame_larger_than_the_socket_buffer_arrives_complete(
    pair: Pair, timeout_s: float | None
) -> None:
    """With a timeout, the kernel accepts only part of the frame in one call."""
    pair[0].settimeout(timeout_s)
    encoded = os.urandom(5_000_000)
    sender = threading.Thread(target=frames.send, args=(pair[0], p.PutTemplate("x", encoded)))
    sender.start()
    body, _ = frames.receive(pair[1])
    sender.join()
    assert p.decode_request(body) == p.PutTemplate("x", encoded)


def test_a_descriptor_arrives_with_its_frame_and_belongs_to_the_receiver(
    pair: Pair, tmp_path: Path
) -> None:
    with open(tmp_path / "file", "w+") as file:
        frames.send(pair[0], p.Leave())
        frames.send(pair[0], p.AttachSlab(), file.fileno())
        frames.send(pair[0], p.Leave())
        received = [frames.receive(pair[1])[1] for _ in range(3)]
        assert [fd is None for fd in received] == [True, False, True]
        fd = received[1]
        assert fd != file.fileno()
        assert os.path.samestat(os.fstat(fd), os.fstat(file.fileno()))
        assert not os.get_inheritable(fd)
        os.close(fd)
        file.write("still open")


def test_an_oversized_frame_is_refused_before_it_is_read(pair: Pair) -> None:
    nbytes = frames.MAX_FRAME_NBYTES + 1
    pair[0].sendall(struct.pack("<I", nbytes) + b"x")
    with pytest.raises(AgentError, match=f"a frame of {nbytes} bytes"):
        frames.receive(pair[1])


def test_unexpected_descriptors_and_those_of_a_refused_frame_are_closed(pair: Pair) -> None:
    with open(os.devnull) as file:
        with nothing_left_open():
            for prefix in (struct.pack("<I", 2**32 - 1), struct.pack("<I", 8) + b"cut"):
                _send_with(pair[0], prefix, [file.fileno()])
                if prefix.endswith(b"cut"):
                    pair[0].shutdown(socket.SHUT_WR)
                with pytest.raises((AgentError, EOFError)):
                    frames.receive(pair[1])
        left, right = socket.socketpair()
        with left, right, nothing_left_open():
            _send_with(left, struct.pack("<I", 1) + b"x", [file.fileno()] * 3)
            _, fd = frames.receive(right)
            os.close(fd)


@pytest.mark.parametrize("at", [4, 5])
def test_a_descriptor_that_comes_after_the_length_is_closed(pair: Pair, at: int) -> None:
    frame = _frame(b"body")
    with open(os.devnull) as file, nothing_left_open():
        pair[0].sendall(frame[:at])
        _send_with(pair[0], frame[at:], [file.fileno()])
        assert frames.receive(pair[1]) == (b"body", None)


def _send_with(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


class _HastySocket(socket.socket):
    """A socket whose peer reads the frame and disconnects before `send` returns."""

    other: socket.socket

    def sendmsg(self, *arguments: Any) -> int:
        sent = super().sendmsg(*arguments)
        self.other.close()
        return sent


def test_a_send_succeeds_if_the_peer_read_all_and_hung_up() -> None:
    """Otherwise the sender does not read the refusal that the peer sent before it hung up."""
    left, right = socket.socketpair()
    with _HastySocket(left.family, left.type, 0, left.detach()) as sender:
        sender.other = right
        frames.send(sender, p.Hello(0, 1))
        assert right.fileno() == -1


# ---------------------------------------------------------------------- against the real agent


def _frame(message: object) -> bytes:
    body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


_HELLO = _frame(p.Hello(77, p.PROTOCOL_VERSION))
NONSENSE = [
    _frame(p.Hello(0, 1))[:-3],
    struct.pack("<I", 2**32 - 1) + b"x" * 1000,
    struct.pack("<I", frames.MAX_FRAME_NBYTES) + b"x" * 1000,
    _frame(b""),
    _frame(b"\xc1\xc1\xc1"),
    _frame({"type": "Explode", "rank": 0}),
    _frame({"type": "Hello", "rank": "0", "protocol": 1}),
    _frame({"type": "Hello", "rank": 2**63}),
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    _frame(p.Staged(0)),
    _frame(p.Hello(77, 999)),
    _HELLO + _frame(b"\xc1"),
    _HELLO + _HELLO,
    _HELLO + _frame(p.AttachSlab()),
    _HELLO + _frame(p.Staged(0)),
    _HELLO + _frame(p.Acquire(1.0)),
    _HELLO + _frame({"type": "Poll", "wait_s": 1e300}),
    _HELLO + _frame({"type": "Poll", "wait_s": float("nan")}),
    _HELLO + _frame(b"\x91" * 10_000),
    _HELLO + _frame(b"\x81\xa4type\xa4\xff\xff\xff\xff"),
]


@contextlib.contextmanager
def open_raw_connection(node: Node, root: Path) -> Iterator[socket.socket]:
    """A connection to the agent from a process other than a trainer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20.0)
        node.place(root).connect(sock)
        yield sock


def _hang_up_and_read(sock: socket.socket) -> bytes:
    """Stop sending; return all bytes that the agent sends before it disconnects, too."""
    sock.shutdown(socket.SHUT_WR)
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(1 << 16):
            received += chunk
    return received


@pytest.fixture
def busy(node: Node, root: Path) -> FakeTrainer:
    """A rank with a committed checkpoint, whose agent gets connections of other programs."""
    trainer = node.trainer(root)
    assert trainer.save(1).error is None
    return trainer


def test_garbage_and_descriptors_end_only_their_own_connection(
    node: Node, root: Path, busy: FakeTrainer
) -> None:
    """The agent closes what it receives, whichever error a message makes."""
    before = open_fds(busy.client.agent_pid, root)
    for nonsense in NONSENSE:
        for fds in (0, 1):
            with open_raw_connection(node, root) as sock, open(os.devnull) as file:
                _send_with(sock, nonsense, [file.fileno()] * fds)
                received = _hang_up_and_read(sock)
            assert b"Granted" not in received
            assert b"SlabOffer" not in received
    eventually(
        "the end of all connections", lambda: open_fds(busy.client.agent_pid, root) == before
    )
    assert [offer.iteration for offer in busy.take()] == [1]
    assert busy.save(2).error is None
    assert_intact(root, 2, [busy])


def _memory(contents: bytes) -> int:
    fd = os.memfd_create("not-a-slab")
    os.write(fd, contents)
    return fd


def _slab_with(meta: bytes) -> int:
    """Return the descriptor of a slab whose staged slot has this description."""
    slab = Slab.create(1, len(meta), 4096, "77")
    slab.slots[0].set_header(SlotHeader(SlotState.STAGED, 1, new_save_id(), len(meta), 4096))
    slab.slots[0].set_meta(meta)
    fd = os.dup(slab.fd)
    slab.close()
    return fd


def test_a_descriptor_that_is_not_a_slab_is_refused_and_closed(
    node: Node, root: Path, busy: FakeTrainer
) -> None:
    before = open_fds(busy.client.agent_pid, root)
    not_slabs = [_memory(b"x" * 100), _memory(bytes(100_000)), socket.socket().detach()]
    not_slabs += [os.open(os.devnull, os.O_RDWR), os.open("/", os.O_RDONLY)]
    for fd in not_slabs:
        with open_raw_connection(node, root) as sock:
            sock.sendall(_HELLO)
            assert b"Welcome" in frames.receive(sock)[0]
            frames.send(sock, p.AttachSlab(), fd)
            reply = p.decode_reply(frames.receive(sock)[0])
            assert isinstance(reply, p.Refused)
            frames.send(sock, p.TakeSlab())
            offer = p.decode_reply(frames.receive(sock)[0])
            assert isinstance(offer, p.SlabOffer)
            assert (offer.present, offer.offers) == (False, ())
            assert [iteration for iteration, _ in offer.saves] == [1], "that of the other rank"
        os.close(fd)
    eventually(
        "the end of all connections", lambda: open_fds(busy.client.agent_pid, root) == before
    )
    assert busy.save(2).error is None


def test_a_slab_whose_staged_slot_has_no_description_harms_nobody(
    node: Node, root: Path, busy: FakeTrainer
) -> None:
    agent = busy.client.agent_pid
    before = len(open_fds(agent, root))
    for meta in (b"", b"\x91" * 10_000):
        fd = _slab_with(meta)
        for _ in range(5):
            with open_raw_connection(node, root) as sock:
                sock.sendall(_HELLO)
                assert b"Welcome" in frames.receive(sock)[0]
                frames.send(sock, p.AttachSlab(), fd)
                _hang_up_and_read(sock)
        os.close(fd)
    kept = before + 1  # rank 77 keeps its last slab
    eventually("the end of all connections", lambda: len(open_fds(agent, root)) == kept)
    assert busy.save(2).error is None


BAD_PEERS = [
    p.OpenPeers("127.0.0.1", 1, p.Identity("x" * 30, "y" * 30)),
    p.OpenPeers("127.0.0.1", 1, p.Identity("\x7f" * 40, "y" * 40)),
    p.OpenPeers("127.0.0.1", 1, p.Identity("\u00e4" * 20, "y" * 40)),
    p.OpenPeers("127.0.0.1", 1, p.Identity("x" * 40, "")),
    p.OpenPeers("192.0.2.1", 1),
    p.OpenPeers("a\0b", 1),
    p.OpenPeers("127.0.0.1", 0),
    p.OpenPeers("127.0.0.1", 10**9),
]


def test_refused_openings_leave_no_descriptor_and_no_thread(
    node: Node, root: Path, busy: FakeTrainer
) -> None:
    pytest.importorskip("zmq")
    agent = busy.client.agent_pid
    tasks = Path(f"/proc/{agent}/task")
    before, threads = len(open_fds(agent, root)), len(list(tasks.iterdir()))
    for _ in range(5):
        for opening in BAD_PEERS:
            with pytest.raises(AgentError):
                busy.client.open_peers(opening)
            if busy.client.has_hung_up():  # no agent opens so many threads
                busy.find_agent()
    eventually("the end of all sockets", lambda: len(open_fds(agent, root)) <= before)
    eventually("the end of all threads", lambda: len(list(tasks.iterdir())) <= threads)
    assert busy.save(2).error is None


# ---------------------------------------------------------------------- two processes of one rank


def test_the_late_end_of_a_former_connection_keeps_the_slot_of_its_successor(
    node: Node, root: Path
) -> None:
    former = node.trainer(root)
    assert former.save(1).error is None
    successor = node.trainer(root)
    successor.take()
    slot = successor.begin(2, new_save_id())
    before = open_fds(former.client.agent_pid, root)
    former.hang_up()
    eventually(
        "the end of the former connection",
        lambda: len(open_fds(successor.client.agent_pid, root)) < len(before),
    )
    assert slot.header.state == SlotState.STAGING
    assert successor.client.poll().pending == 0
