"""Transfer of spans of every rank's buffer to the ranks that request them, in bounded rounds.

A rank sends messages only to ranks that request its bytes. Every stream is split into equal parts,
so that a long stream takes as many rounds as a short one. If the buffers have room, parts are large
enough for fast messages.
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
    run_and_agree,
)
from megatron_flashckpt.load.gpu_buffers import host_buffer

#: Bytes of the widest element.
ALIGNMENT = 8

Span = tuple[int, int]
"""Offset in the sender's buffer, and length in bytes."""

Cut = tuple[int, int, int, int]
"""Number of a span, start within the span, start and end in the sender's buffer."""

Take = Callable[[int, int, int, torch.Tensor], None]
"""Callback; arguments: peer, number of the span, start within the span, and the bytes."""


class Stream:
    """Spans of a buffer laid end to end, which one rank sends to one other rank in order.

    Spans start at multiples of the widest element, so that a cut at such a multiple never splits
    an element.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._ends = list(itertools.accumulate(_aligned(nbytes) for _, nbytes in spans))
        self.nbytes = self._ends[-1] if self._ends else 0

    def cut(self, low: int, high: int) -> list[Cut]:
        """Return the cuts that form stream bytes `[low, high)`.

        Args:
            low, high: multiples of `ALIGNMENT`.
        """
        cuts = []
        for number in range(bisect.bisect_right(self._ends, low), len(self._spans)):
            offset, nbytes = self._spans[number]
            position = self._ends[number] - _aligned(nbytes)
            if position >= high:
                break
            start, end = max(low, position), min(high, position + nbytes)
            if start < end:
                shift = offset - position
                cuts.append((number, start - position, start + shift, end + shift))
        return cuts


Streams = Mapping[int, Stream]
"""Non-empty streams by peer, which is a rank of the group."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Buffers:
    """Buffers of one rank for a round: on the GPU with NCCL, else in host memory.

    The buffers are allocated once before the first round, so that no later round runs out of
    memory.
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
    """Send `outgoing[peer]` to every peer, and pass received bytes to `take`. Collective.

    Args:
        own: this rank's buffer, flat uint8, in host memory.
        incoming: the spans that each peer sends to this rank, with offsets in the peer's buffer.
        room: fills `own`, and returns the bytes of this rank's send buffer, which are also those
            of its receive buffer. The value may differ between ranks.
        take: called with peer, span, start in the span, and the bytes (aligned, valid during the
            call only).

    Raises:
        FlashCkptError: on all ranks of `group`, if a rank has no memory for its buffers, or if
            `room` or `take` raised on any.
    """
    sizes, buffers = _agreed_sizes(outgoing, incoming, room, group)
    failure: Exception | None = None
    for number in range(sizes.rounds(outgoing, incoming)):
        sends, receives = sizes.cuts(outgoing, number), sizes.cuts(incoming, number)
        sent = _buffer_parts(sends, buffers.sent)
        received = _buffer_parts(receives, buffers.received)
        # A failed rank joins the remaining rounds with arbitrary bytes, because the others wait
        # for it. All ranks agree on the failure at the end.
        if failure is None:
            parts = [own[a:b] for cuts in sends.values() for *_, a, b in cuts]
            failure = attempt(functools.partial(buffers.fill, parts)).error
        send_and_receive(sent, received, group)
        if failure is None:
            failure = attempt(functools.partial(_deliver, receives, received, take)).error
    run_and_agree(functools.partial(_raise, failure), group)


@dataclasses.dataclass(frozen=True)
class RoundSizes:
    """Sizes of the parts of each stream per round; equal on all ranks once they have agreed."""

    most_rounds: int
    """Rounds for a stream of any length; fewer if its parts would be shorter than `least`."""
    least: int
    """Lower bound of a part's bytes, a multiple of `ALIGNMENT`."""

    @classmethod
    def of(cls, streams: Streams, room: int) -> RoundSizes:
        """Return the largest parts with which a round of `streams` fits into `room` bytes.

        A quarter of the room is reserved for parts of the shortest length.
        """
        room = max(room, _least_room(streams))
        least = room // 4 // max(len(streams), 1) // ALIGNMENT * ALIGNMENT
        # A part is rounded up to whole elements.
        rest = room - len(streams) * (least + ALIGNMENT)
        return cls(max(1, -(-_nbytes(streams) // rest)), least)

    def quota(self, nbytes: int) -> int:
        """Return the bytes per round of a stream of `nbytes`."""
        return max(_aligned(-(-nbytes // self.most_rounds)), self.least)

    def rounds(self, *streams: Streams) -> int:
        """Return the number of rounds in which this rank sends or receives."""
        lengths = [stream.nbytes for by_peer in streams for stream in by_peer.values()]
        return max((-(-nbytes // self.quota(nbytes)) for nbytes in lengths), default=0)

    def cuts(self, streams: Streams, number: int) -> dict[int, list[Cut]]:
        """Return the cuts of the streams for round `number`."""
        cuts = {}
        for peer, stream in streams.items():
            quota = self.quota(stream.nbytes)
            if number * quota < stream.nbytes:
                cuts[peer] = stream.cut(number * quota, (number + 1) * quota)
        return cuts


def _least_room(streams: Streams) -> int:
    return 4 * ALIGNMENT * max(len(streams), 1)


def _nbytes(streams: Streams) -> int:
    return sum(stream.nbytes for stream in streams.values())


def _agreed_sizes(
    outgoing: Streams, incoming: Streams, room: Callable[[], int], group: Group
) -> tuple[RoundSizes, _Buffers]:
    """Return the sizes on which all ranks agree, and this rank's buffers. Collective."""

    def prepared() -> tuple[RoundSizes, RoundSizes, _Buffers]:
        nbytes = room()
        send_nbytes, receive_nbytes = (
            min(_nbytes(streams), max(nbytes, _least_room(streams)))
            for streams in (outgoing, incoming)
        )
        buffers = _Buffers(send_nbytes, receive_nbytes, device_of(group))
        return RoundSizes.of(outgoing, nbytes), RoundSizes.of(incoming, nbytes), buffers

    outcome = attempt(prepared)
    # The largest number of rounds and the shortest parts of any rank count.
    proposals = [] if outcome.value is None else outcome.value[:2]
    rounds = max((sizes.most_rounds for sizes in proposals), default=0)
    least = min((sizes.least for sizes in proposals), default=0)
    failed, rounds, least = reduce_largest([outcome.error is not None, rounds, -least], group)
    if failed:
        raise_agreed(gather_objects(outcome.report, group), outcome.error)
    assert outcome.value is not None
    return RoundSizes(rounds, -least), outcome.value[2]


def _buffer_parts(cuts: Mapping[int, list[Cut]], buffer: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the consecutive parts of `buffer`, one for each peer."""
    parts = {}
    position = 0
    for peer, peer_cuts in cuts.items():
        nbytes = sum(b - a for *_, a, b in peer_cuts)
        parts[peer] = buffer[position : position + nbytes]
        position += nbytes
    return parts


def send_and_receive(
    sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor], group: Group
) -> None:
    """Send tensors to peers and receive tensors; return when done, or enqueued on the GPU.

    Every receiver calls this with a tensor of the length that its peer sends. Once an earlier
    collective has connected the group, only ranks that send or receive need to call this.

    Args:
        sent, received: contiguous tensors by peer (a rank of `group`), on the group's device.
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


def _deliver(
    cuts: Mapping[int, list[Cut]], received: Mapping[int, torch.Tensor], take: Take
) -> None:
    """Call `take` with every span of a round."""
    for peer, peer_cuts in cuts.items():
        position = 0
        for number, start, a, b in peer_cuts:
            part = received[peer][position : position + b - a]
            # Bytes can be viewed as elements only at an aligned address.
            take(peer, number, start, part.clone() if part.data_ptr() % ALIGNMENT else part)
            position += b - a


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
