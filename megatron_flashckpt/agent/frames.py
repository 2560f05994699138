"""How messages travel between a trainer and its node's agent.

A frame is a 4-byte little-endian length and a msgpack-encoded message on a Unix stream socket; a
slab's file descriptor rides on the first byte of its frame (SCM_RIGHTS). No pickle.
"""

from __future__ import annotations

import array
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
    rights = []
    if fd is not None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    sent = sock.sendmsg([frame], rights)
    if sent < len(frame):
        # Not for nothing: an empty send fails if the other side has answered and gone meanwhile.
        sock.sendall(memoryview(frame)[sent:])


def receive(sock: socket.socket, limit_nbytes: int = MAX_FRAME_NBYTES) -> tuple[bytes, int | None]:
    """Return one frame's body and the descriptor that came with it (the caller owns it).

    Raises:
        EOFError: the other side closed the connection.
        AgentError: the frame is larger than `limit_nbytes`.
    """
    fds: list[int] = []
    try:
        prefix = _receive_exactly(sock, _LENGTH.size, fds)
        (length,) = _LENGTH.unpack(prefix)
        if length > limit_nbytes:
            raise AgentError(f"a frame of {length} bytes is not of this protocol")
        body = _receive_exactly(sock, length, fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    for fd in fds[1:]:
        os.close(fd)
    return body, fds[0] if fds else None


def _receive_exactly(sock: socket.socket, nbytes: int, fds: list[int]) -> bytes:
    parts = bytearray()
    while len(parts) < nbytes:
        chunk, ancillary, _, _ = sock.recvmsg(
            min(nbytes - len(parts), 1 << 20), socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(payload[: len(payload) // received.itemsize * received.itemsize])
                fds += received
        if not chunk:
            raise EOFError
        parts += chunk
    return bytes(parts)


class Peer(NamedTuple):
    """The process at the other end, as the kernel vouches for it."""

    pid: int
    """0 if it cannot be seen from here."""
    uid: int


def peer(sock: socket.socket) -> Peer:
    """Return who connected; or, to those who connect, who called `listen` last."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(credentials)[:2])
