"""Reads by one rank of each node, whose results the other ranks of the node receive.

Used for reads of all ranks before torch.distributed is initialised. The ranks that one torchrun
started on a node connect to an abstract Unix socket, which local rank 0 opens before it reads. The
kernel closes the socket with the process, so an earlier start of the job can never reply.

torchrun's own store does not serve for this. It persists over a restart, and the restart count does
not change on a node whose ranks restart because of another node. It is one server for all nodes,
and with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE` it does not exist yet.

After any error, a rank reads from storage itself.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import xxhash

from megatron_flashckpt import forks
from megatron_flashckpt.agent.frames import peer

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Longest wait of a rank until local rank 0 has opened its socket, in seconds.
APPEAR_S = 60.0
#: Longest wait of a rank for the reply, in seconds. Retries of a read end after 120 s.
ANSWER_S = 150.0
#: Seconds for which local rank 0 serves late ranks. Later ranks would time out in Megatron's first
#: collective.
_SERVE_S = 600.0
#: Longest time of one rank to receive its reply, in seconds.
_SEND_S = 10.0
_RETRY_S = 0.02
#: Places in the queue for processes of other users, which are accepted and closed at once.
_STRANGERS = 64
#: Magic, number of bytes, digest.
_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"fckpt\0a1"
_MAX_NBYTES = 2**30

#: Number of the next call. All ranks of a node make the same calls.
_calls = itertools.count()


class Place(NamedTuple):
    """Place of this rank among the ranks that one torchrun started on a node."""

    key: str
    """Key of these ranks, which changes when they are restarted."""
    local_rank: int
    ranks: int


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Return the place that torchrun's variables name; None without torchrun or other ranks."""
    try:
        local_rank, ranks = int(environ["LOCAL_RANK"]), int(environ["LOCAL_WORLD_SIZE"])
        run = environ["TORCHELASTIC_RUN_ID"]
    except (KeyError, ValueError):
        return None
    if ranks < 2 or not 0 <= local_rank < ranks:
        return None
    names = ("TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    # `<torchrun's own directory>/attempt_<n>/<local rank>/error.json`
    attempt = os.path.dirname(os.path.dirname(environ.get("TORCHELASTIC_ERROR_FILE", "")))
    return Place("\0".join((run, *(environ.get(n, "") for n in names), attempt)), local_rank, ranks)


def read_once(
    topic: str,
    read: Callable[[], _T],
    encode: Callable[[_T], bytes],
    decode: Callable[[bytes], _T],
    environ: Mapping[str, str] = os.environ,
) -> _T:
    """Return the result of `read` on local rank 0, on every rank of the node.

    All ranks of a node call this in the same order. A rank calls `read` itself if torchrun has not
    started several ranks on the node, or if no complete reply arrives in time.

    Args:
        topic: identity of the data; ranks with another topic get no reply.
        encode, decode: convert the result to bytes, and back. Both ends are the same program.
        environ: the environment that names this rank's place.

    Raises:
        Exception: as `read`; the other ranks then read themselves.
    """
    place = place_of(environ)
    if place is None:
        return read()
    name = socket_name(place, next(_calls), topic)
    if place.local_rank == 0:
        return _lead(name, read, encode, place.ranks - 1)
    try:
        return decode(_receive(name))
    except Exception as error:  # after any error, storage has the correct data
        logger.debug("%s: this rank reads it itself: %s", topic, error)
        return read()


def socket_name(place: Place, call: int, topic: str) -> str:
    """Return the abstract socket name for call number `call` of all ranks."""
    identity = "\0".join((str(os.getuid()), place.key, str(call), topic))
    return f"\0flashckpt-{xxhash.xxh3_128_hexdigest(os.fsencode(identity))}"


def _lead(name: str, read: Callable[[], _T], encode: Callable[[_T], bytes], others: int) -> _T:
    """Return the result of `read`, and send it to `others` ranks, late ones from a thread."""
    listener = _listening(name, others)
    if listener is None:
        return read()
    try:
        result = read()
        frame = frame_of(encode(result))
    except BaseException:
        listener.close()  # waiting ranks then read themselves at once
        raise
    # Serve waiting ranks now: this process may end soon if its load is refused.
    others -= _serve(listener, frame, others, 0.0)
    if others:
        _serve_in_background(listener, frame, others)
    else:
        listener.close()
    return result


def _listening(name: str, others: int) -> socket.socket | None:
    listener = None
    try:
        with forks.forks_blocked():
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            forks.close_in_children(listener)
        listener.bind(name)
        listener.listen(others + _STRANGERS)
    except OSError as error:
        logger.debug("local rank 0 cannot serve the other ranks of this node: %s", error)
        if listener is not None:
            listener.close()
        return None
    return listener


def _serve_in_background(listener: socket.socket, frame: bytes, others: int) -> None:
    thread = threading.Thread(
        target=_serve_rest,
        args=(listener, frame, others),
        name="flashckpt-node-leader",
        daemon=True,
    )
    try:
        thread.start()
    except RuntimeError as error:  # this process may have no more threads
        logger.debug("late ranks of this node read from storage themselves: %s", error)
        listener.close()


def _serve_rest(listener: socket.socket, frame: bytes, others: int) -> None:
    with listener, contextlib.suppress(OSError):
        _serve(listener, frame, others, _SERVE_S)


def _serve(listener: socket.socket, frame: bytes, others: int, within_s: float) -> int:
    """Send `frame` to at most `others` ranks that connect in time; return how many connected.

    Processes of other users may connect, too. They get nothing and take no rank's turn.
    """
    deadline = time.monotonic() + within_s
    served = 0
    while served < others:
        listener.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            rank, _ = listener.accept()
        except (BlockingIOError, TimeoutError):
            return served
        with rank, contextlib.suppress(OSError):
            if _is_own(rank):
                served += 1
                rank.settimeout(_SEND_S)
                rank.sendall(frame)
    return served


def _receive(name: str) -> bytes:
    """Return the body of the reply of local rank 0.

    Raises:
        OSError: no reply arrived in time, or local rank 0 has ended.
        ValueError: the reply is damaged or not from local rank 0.
    """
    with _connected(name) as leader:
        if not _is_own(leader):
            raise PermissionError("another user has the socket of local rank 0")
        deadline = time.monotonic() + ANSWER_S
        magic, nbytes, digest = _HEAD.unpack(_exactly(leader, _HEAD.size, deadline))
        if magic != _MAGIC or nbytes > _MAX_NBYTES:
            raise ValueError("the reply is not from local rank 0")
        body = _exactly(leader, nbytes, deadline)
    if xxhash.xxh3_64_intdigest(body) != digest:
        raise ValueError("the reply of local rank 0 was damaged in transit")
    return body


def _connected(name: str) -> socket.socket:
    deadline = time.monotonic() + APPEAR_S
    while True:
        leader = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            leader.settimeout(max(_RETRY_S, deadline - time.monotonic()))
            leader.connect(name)
            return leader
        except (ConnectionRefusedError, BlockingIOError):  # not open yet, or its queue is full
            leader.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        except BaseException:
            leader.close()
            raise


def _exactly(leader: socket.socket, nbytes: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"local rank 0 did not reply within {ANSWER_S:.0f} s")
        leader.settimeout(left_s)
        part = leader.recv(min(nbytes - len(received), 2**20))
        if not part:
            raise ConnectionResetError("local rank 0 ended before its reply")
        received += part
    return bytes(received)


def frame_of(body: bytes) -> bytes:
    """Return the message that carries `body`."""
    return _HEAD.pack(_MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body


def _is_own(other: socket.socket) -> bool:
    return peer(other).uid == os.getuid()
