"""Frames: the transport of messages between a trainer and its node's agent.

A frame is a 4-byte little-endian length and a msgpack-encoded message on a Unix stream socket. A
slab's file descriptor travels with the first byte of its frame (SCM_RIGHTS). No pickle.
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
        # Only if bytes are left: an empty send fails if the peer has read the frame and closed.
        sock.sendall(memoryview(frame)[sent:])


def receive(sock: socket.socket, limit_nbytes: int = MAX_FRAME_NBYTES) -> tuple[bytes, int | None]:
    """Return one frame's body and the descriptor that came with it (the caller owns it).

    Raises:
        EOFError: the other side closed the connection.
        AgentError: the frame is larger than `limit_nbytes`.
    """
    # The kernel closes descriptors without room in the call: surplus ones, and those of the body.
    start, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 1)
    try:
        for fd in fds:
            os.set_inheritable(fd, False)  # Python 3.11 drops MSG_CMSG_CLOEXEC
        (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size, start))
        if length > limit_nbytes:
            raise AgentError(f"a frame of {length} bytes is not of this protocol")
        body = _receive_exactly(sock, length)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return body, fds[0] if fds else None


class ReceivedDescriptor:
    """A descriptor that came with a frame. A context manager, which closes it if nobody took it."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def take(self) -> int | None:
        """Return the descriptor, which the caller owns from now on; None if there is none."""
        fd, self._fd = self._fd, None
        return fd

    def __enter__(self) -> ReceivedDescriptor:
        return self

    def __exit__(self, *_: object) -> None:
        if (fd := self.take()) is not None:
            os.close(fd)


def _receive_exactly(sock: socket.socket, nbytes: int, start: bytes = b"") -> bytes:
    """Return `nbytes`, of which `start` was received before.

    Raises:
        EOFError: the other side closed the connection too early.
    """
    received = bytearray(start)
    while len(received) < nbytes:
        chunk = sock.recv(min(nbytes - len(received), 1 << 20))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)


class Peer(NamedTuple):
    """Process at the other end, as reported by the kernel."""

    pid: int
    """0 if the process is not visible in this pid namespace."""
    uid: int


def peer(sock: socket.socket) -> Peer:
    """Return the connecting process; on the connecting side, the last caller of `listen`."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(credentials)[:2])
