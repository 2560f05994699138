"""Spans of every rank's buffer to the ranks that want them, in rounds of bounded size.

A rank sends messages to the ranks that want something of it, and to no others. Every stream goes
in equal parts, so that a long one takes as many rounds as a short one; but parts are not so small
that messages are slow, as long as the buffers of all ranks have room for that.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_flashckpt.collectives import (
    Group,
    attempt,
    device_of,
    gather_objects,
    raise_agreed,
    reduce_largest,
    together,
)
from megatron_flashckpt.load.gpu_buffers import host_buffer

#: The widest element.
ALIGNMENT = 8

Span = tuple[int, int]
"""Offset in the sender's buffer, bytes."""

Cut = tuple[int, int, int, int]
"""Number of a span, start within the span, start and end in the sender's buffer."""

Take = Callable[[int, int, int, torch.Tensor], None]
"""Called with the peer, the number of the span, the start within the span, and the bytes."""


class Stream:
    """Spans of a buffer laid end to end: what one rank sends to one other, in order.

    Spans start at multiples of the widest element, so that no cut at such a multiple goes through
    an element.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._ends = list(itertools.accumulate(_aligned(nbytes) for _, nbytes in spans))
        self.nbytes = self._ends[-1] if self._ends else 0

    def cut(self, low: int, high: int) -> list[Cut]:
        """Return the cuts that make up stream bytes `[low, high)`.

        Args:
            low, high: multiples of `ALIGNMENT`.
        """
        found = []
        for which in range(bisect.bisect_right(self._ends, low), len(self._spans)):
            offset, nbytes = self._spans[which]
            position = self._ends[which] - _aligned(nbytes)
            if position >= high:
                break
            start, end = max(low, position), min(high, position + nbytes)
            if start < end:
                shift = offset - position
                found.append((which, start - position, start + shift, end + shift))
        return found


Streams = Mapping[int, Stream]
"""By peer, a rank of the group; none of them is empty."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Buffers:
    """Buffers of one rank for a round: on the GPU with NCCL, else in host memory.

    They are made once, before the first round, so that no later round can run out of memory.
    """

    def __init__(self, send_nbytes: int, receive_nbytes: int, device: str) -> None:
        on_gpu = device == "cuda"
        self._staged = host_buffer(send_nbytes, pinned=on_gpu)
        self.sent = self._staged
        if on_gpu:
            self.sent = torch.empty(send_nbytes, dtype=torch.uint8, device=device)
        self.received = torch.empty(receive_nbytes, dtype=torch.uint8, device=device)

    def fill(self, parts: list[torch.Tensor]) -> None:
        """Lay `parts` end to end into `sent`."""
        if not parts:
            return
        staged = self._staged[: sum(part.numel() for part in parts)]
        torch.cat(parts, out=staged)
        if self.sent is not self._staged:
            self.sent[: staged.numel()].copy_(staged)


def transfer(
    own: torch.Tensor,
    outgoing: Streams,
    incoming: Streams,
    *,
    room: Callable[[], int],
    take: Take,
    group: Group = None,
) -> None:
    """Send `outgoing[peer]` to every peer and take what they send. Collective.

    Args:
        own: this rank's buffer, flat uint8, in host memory.
        incoming: the spans that each peer sends here, as it sees them.
        room: makes `own` ready, and returns the bytes that this rank has for what it sends in a
            round, and again for what it receives; ranks may have different ones.
        take: called with peer, span, start in the span, and the bytes (aligned, not kept).

    Raises:
        FlashCkptError: on all ranks of `group`, if a rank has no memory for its buffers, or if
            `room` or `take` raised on any.
    """
    pace, buffers = _begun(outgoing, incoming, room, group)
    failure: Exception | None = None
    for turn in range(pace.rounds(outgoing, incoming)):
        sends, receives = pace.cuts(outgoing, turn), pace.cuts(incoming, turn)
        sent, received = _laid_out(sends, buffers.sent), _laid_out(receives, buffers.received)
        # A rank that has failed joins the remaining rounds with arbitrary bytes, because the
        # others wait for it; all ranks agree on the failure at the end.
        if failure is None:
            parts = [own[a:b] for cuts in sends.values() for *_, a, b in cuts]
            failure = attempt(functools.partial(buffers.fill, parts)).error
        send_and_receive(sent, received, group)
        if failure is None:
            failure = attempt(functools.partial(_hand_out, receives, received, take)).error
    together(functools.partial(_raise, failure), group)


@dataclasses.dataclass(frozen=True)
class Pace:
    """How much of each stream goes in a round; equal on all ranks once they have agreed."""

    turns: int
    """Rounds for a stream of any length, unless its parts would be shorter than `least`."""
    least: int
    """Bytes of the shortest parts, a multiple of `ALIGNMENT`."""

    @classmethod
    def of(cls, streams: Streams, room: int) -> Pace:
        """Return the fastest pace at which what a round has of `streams` fits into `room` bytes.

        A quarter of the room is for parts of the shortest length.
        """
        room = max(room, _least_room(streams))
        least = room // 4 // max(len(streams), 1) // ALIGNMENT * ALIGNMENT
        # A part is rounded up to whole elements.
        rest = room - len(streams) * (least + ALIGNMENT)
        return cls(max(1, -(-_nbytes(streams) // rest)), least)

    def quota(self, nbytes: int) -> int:
        """Return the bytes that go in a round of a stream of so many."""
        return max(_aligned(-(-nbytes // self.turns)), self.least)

    def rounds(self, *streams: Streams) -> int:
        """Return in how many rounds this rank has something to send or to receive."""
        lengths = [stream.nbytes for each in streams for stream in each.values()]
        return max((-(-nbytes // self.quota(nbytes)) for nbytes in lengths), default=0)

    def cuts(self, streams: Streams, turn: int) -> dict[int, list[Cut]]:
        """Return what round `turn` has of the streams."""
        found = {}
        for peer, stream in streams.items():
            quota = self.quota(stream.nbytes)
            if turn * quota < stream.nbytes:
                found[peer] = stream.cut(turn * quota, (turn + 1) * quota)
        return found


def _least_room(streams: Streams) -> int:
    return 4 * ALIGNMENT * max(len(streams), 1)


def _nbytes(streams: Streams) -> int:
    return sum(stream.nbytes for stream in streams.values())


def _begun(
    outgoing: Streams, incoming: Streams, room: Callable[[], int], group: Group
) -> tuple[Pace, _Buffers]:
    """Return the pace that all ranks agree on, and this rank's buffers. Collective."""

    def prepared() -> tuple[Pace, Pace, _Buffers]:
        nbytes = room()
        send_nbytes, receive_nbytes = (
            min(_nbytes(streams), max(nbytes, _least_room(streams)))
            for streams in (outgoing, incoming)
        )
        buffers = _Buffers(send_nbytes, receive_nbytes, device_of(group))
        return Pace.of(outgoing, nbytes), Pace.of(incoming, nbytes), buffers

    tried = attempt(prepared)
    # The slowest rank decides, and the one whose shortest parts are shortest.
    paces = [] if tried.value is None else tried.value[:2]
    turns = max((pace.turns for pace in paces), default=0)
    least = min((pace.least for pace in paces), default=0)
    failed, turns, least = reduce_largest([tried.error is not None, turns, -least], group)
    if failed:
        raise_agreed(gather_objects(tried.said, group), tried.error)
    assert tried.value is not None
    return Pace(turns, -least), tried.value[2]


def _laid_out(cuts: Mapping[int, list[Cut]], buffer: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the part of `buffer` for each peer, one after the other."""
    found = {}
    position = 0
    for peer, of_peer in cuts.items():
        nbytes = sum(b - a for *_, a, b in of_peer)
        found[peer] = buffer[position : position + nbytes]
        position += nbytes
    return found


def send_and_receive(
    sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor], group: Group
) -> None:
    """Send to peers and fill what they send; returns when that is done, or enqueued on the GPU.

    Every receiver calls this with a tensor of the length that is sent to it. Only ranks that send
    or receive something need call it, once something else has connected the group.

    Args:
        sent, received: by peer, a rank of `group`; on the device of the group, contiguous.
    """
    operations = [
        dist.P2POp(operation, tensor, _global_rank(peer, group), group)
        for operation, tensors in ((dist.isend, sent), (dist.irecv, received))
        for peer, tensor in tensors.items()
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _global_rank(peer: int, group: Group) -> int:
    return peer if group is None else dist.get_global_rank(group, peer)


def _hand_out(
    cuts: Mapping[int, list[Cut]], received: Mapping[int, torch.Tensor], take: Take
) -> None:
    """Call `take` with every span of a round."""
    for peer, of_peer in cuts.items():
        position = 0
        for which, start, a, b in of_peer:
            part = received[peer][position : position + b - a]
            # Only at an aligned place can bytes be viewed as elements.
            take(peer, which, start, part.clone() if part.data_ptr() % ALIGNMENT else part)
            position += b - a


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
