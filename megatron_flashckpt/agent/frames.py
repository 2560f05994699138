"""How messages travel between a trainer and its node's agent.

A frame is a 4-byte little-endian length and a msgpack-encoded message on a Unix stream socket; a
slab's file descriptor rides on the first byte of its frame (SCM_RIGHTS). No pickle.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

import msgspec

from megatron_flashckpt.errors import AgentError

MAX_FRAME_NBYTES = 256 * 1024 * 1024

_LENGTH = struct.Struct("<I")
_UCRED = struct.Struct("iII")


def send(sock: socket.socket, message: msgspec.Struct, fd: int | None = None) -> None:
    """Send one frame, with a descriptor if given."""
    body = msgspec.msgpack.encode(message)
    frame = _LENGTH.pack(len(body)) + body
    sent = socket.send_fds(sock, [frame], [] if fd is None else [fd])
    if sent < len(frame):
        # An empty send would fail if the other side has read the frame, answered and gone.
        sock.sendall(memoryview(frame)[sent:])


def receive(sock: socket.socket, limit_nbytes: int = MAX_FRAME_NBYTES) -> tuple[bytes, int | None]:
    """Return one frame's body and the descriptor that came with it (the caller owns it).

    Raises:
        EOFError: the other side closed the connection.
        AgentError: the frame is larger than `limit_nbytes`.
    """
    # The kernel closes descriptors that no call has room for: surplus ones, and those of the body.
    start, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 1)
    try:
        for fd in fds:
            os.set_inheritable(fd, False)  # `recv_fds` of Python 3.11 passes no MSG_CMSG_CLOEXEC on
        (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size, start))
        if length > limit_nbytes:
            raise AgentError(f"a frame of {length} bytes is not of this protocol")
        body = _receive_exactly(sock, length)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return body, fds[0] if fds else None


def _receive_exactly(sock: socket.socket, nbytes: int, start: bytes = b"") -> bytes:
    """Return `nbytes`, of which `start` has been received.

    Raises:
        EOFError: the other side closed the connection before.
    """
    received = bytearray(start)
    while len(received) < nbytes:
        chunk = sock.recv(min(nbytes - len(received), 1 << 20))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)


class Peer(NamedTuple):
    """The process at the other end, as the kernel vouches for it."""

    pid: int
    """0 if it cannot be seen from here."""
    uid: int


def peer(sock: socket.socket) -> Peer:
    """Return who connected; or, to those who connect, who called `listen` last."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(credentials)[:2])
