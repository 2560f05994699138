"""One rank of each node reads from storage; the other ranks of the node receive what it read.

For what all ranks read before torch.distributed is initialised. The ranks that one torchrun has
started on a node meet at an abstract Unix socket, which local rank 0 opens before it reads. Its
kernel closes the socket with the process, so nothing stays behind, and an earlier start of the same
job can never answer. torchrun's own store outlives a restart, and the restart count does not change
on a node whose ranks are restarted because of another node. That store is also one server for all
nodes, and with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE` there is none yet.

A rank that has any doubt reads from storage itself.
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

#: Seconds that a rank waits until local rank 0 has opened its socket.
APPEAR_S = 60.0
#: Seconds that a rank then waits for the answer. Retries of a read end after 120 s.
ANSWER_S = 150.0
#: Seconds that local rank 0 answers ranks that come later. Others would time out in Megatron's
#: first collective by then.
_SERVE_S = 600.0
#: Seconds for one rank to take its answer.
_SEND_S = 10.0
_RETRY_S = 0.02
#: Magic, number of bytes, digest.
_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"fckpt\0a1"
_MAX_NBYTES = 2**30

#: Number of the next call. All ranks of a node make the same calls.
_calls = itertools.count()


class Place(NamedTuple):
    """This rank's place among the ranks that one torchrun has started on a node."""

    key: str
    """Equal on these ranks only, and only until they are restarted."""
    local_rank: int
    ranks: int


def place_of(environ: Mapping[str, str]) -> Place | None:
    """Return the place that torchrun's variables name; None: no torchrun, or no other rank."""
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
    """Return `read()` of local rank 0, on every rank of the node.

    Called by all ranks of a node, in the same order of calls. A rank calls `read` itself where
    torchrun has not started several ranks of the node, and where no whole answer comes in time.

    Args:
        topic: what is read; ranks that read something else get no answer.
        encode, decode: the result as bytes, and back. Both ends are the same program.
        environ: the environment that names this rank's place.

    Raises:
        Exception: what `read` raises. The other ranks then read themselves.
    """
    place = place_of(environ)
    if place is None:
        return read()
    name = socket_name(place, next(_calls), topic)
    if place.local_rank == 0:
        return _lead(name, read, encode, place.ranks - 1)
    try:
        return decode(_receive(name))
    except Exception as error:  # whatever is wrong, storage has the truth
        logger.debug("%s: this rank reads it itself: %s", topic, error)
        return read()


def socket_name(place: Place, call: int, topic: str) -> str:
    """Return the abstract name at which the ranks meet in their call number `call`."""
    named = "\0".join((str(os.getuid()), place.key, str(call), topic))
    return f"\0flashckpt-{xxhash.xxh3_128_hexdigest(os.fsencode(named))}"


def _lead(name: str, read: Callable[[], _T], encode: Callable[[_T], bytes], others: int) -> _T:
    """Return `read()`, and have a thread send it to `others` ranks that ask for it."""
    listener = _listening(name, others)
    if listener is None:
        return read()
    try:
        result = read()
        frame = frame_of(encode(result))
    except BaseException:
        listener.close()  # the ranks that wait learn at once that no answer comes
        raise
    # Those that wait already get theirs now: this process may end soon if it was refused.
    others -= _serve(listener, frame, others, 0.0)
    if others:
        _serve_in_background(listener, frame, others)
    else:
        listener.close()
    return result


def _listening(name: str, others: int) -> socket.socket | None:
    listener = None
    try:
        with forks.held_off():
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            forks.close_in_children(listener)
        listener.bind(name)
        listener.listen(others)
    except OSError as error:
        logger.debug("no other rank of this node is answered: %s", error)
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
        logger.debug("the other ranks of this node read themselves: %s", error)
        listener.close()


def _serve_rest(listener: socket.socket, frame: bytes, others: int) -> None:
    with listener, contextlib.suppress(OSError):
        _serve(listener, frame, others, _SERVE_S)


def _serve(listener: socket.socket, frame: bytes, others: int, within_s: float) -> int:
    """Send `frame` to at most `others` ranks that connect in time; return how many connected."""
    deadline = time.monotonic() + within_s
    for served in range(others):
        listener.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            rank, _ = listener.accept()
        except (BlockingIOError, TimeoutError):
            return served
        with rank, contextlib.suppress(OSError):
            if _is_own(rank):
                rank.settimeout(_SEND_S)
                rank.sendall(frame)
    return others


def _receive(name: str) -> bytes:
    """Return the body of the answer.

    Raises:
        OSError: none came in time, or local rank 0 has ended.
        ValueError: it is no whole answer.
    """
    with _connected(name) as leader:
        if not _is_own(leader):
            raise PermissionError("another user has the socket of local rank 0")
        deadline = time.monotonic() + ANSWER_S
        magic, nbytes, digest = _HEAD.unpack(_exactly(leader, _HEAD.size, deadline))
        if magic != _MAGIC or nbytes > _MAX_NBYTES:
            raise ValueError("what answers is not local rank 0")
        body = _exactly(leader, nbytes, deadline)
    if xxhash.xxh3_64_intdigest(body) != digest:
        raise ValueError("the answer of local rank 0 has changed on its way")
    return body


def _connected(name: str) -> socket.socket:
    deadline = time.monotonic() + APPEAR_S
    while True:
        leader = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            leader.settimeout(max(_RETRY_S, deadline - time.monotonic()))
            leader.connect(name)
            return leader
        except (ConnectionRefusedError, BlockingIOError):  # not there yet, or its queue is full
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
            raise TimeoutError(f"local rank 0 has not answered within {ANSWER_S:.0f} s")
        leader.settimeout(left_s)
        part = leader.recv(min(nbytes - len(received), 2**20))
        if not part:
            raise ConnectionResetError("local rank 0 has ended before its answer")
        received += part
    return bytes(received)


def frame_of(body: bytes) -> bytes:
    """Return `body` as it is sent."""
    return _HEAD.pack(_MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body


def _is_own(other: socket.socket) -> bool:
    return peer(other).uid == os.getuid()
