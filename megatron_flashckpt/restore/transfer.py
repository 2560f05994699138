"""Spans of every rank's buffer to the ranks that want them, in rounds of bounded size."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_flashckpt.restore.collectives import Group, attempt, device_of, together
from megatron_flashckpt.restore.gpu import host_buffer

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

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self.nbytes = sum(_aligned(nbytes) for _, nbytes in spans)

    def cut(self, low: int, high: int) -> list[Cut]:
        """Return the cuts that make up stream bytes `[low, high)`.

        Args:
            low, high: multiples of `ALIGNMENT`.
        """
        found = []
        position = 0
        for which, (offset, nbytes) in enumerate(self._spans):
            start, end = max(low, position), min(high, position + nbytes)
            if start < end:
                shift = offset - position
                found.append((which, start - position, start + shift, end + shift))
            position += _aligned(nbytes)
        return found


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
    outgoing: list[Stream],
    incoming: list[Stream],
    *,
    turns: int,
    quota: int,
    take: Take,
    group: Group = None,
) -> None:
    """Send `outgoing[peer]` to every peer and take what they send. Collective.

    Args:
        own: this rank's buffer, flat uint8, in host memory.
        incoming: the spans that each peer sends here, as it sees them.
        turns, quota: rounds, and bytes per pair of ranks and round (a multiple of `ALIGNMENT`);
            alike on all ranks.
        take: called with peer, span, start in the span, and the bytes (aligned, not kept).

    Raises:
        FlashCkptError: on all ranks of `group`, if a rank has no memory for its buffers, or if
            `take` raised on any.
    """
    buffers = together(
        lambda: _Buffers(
            _most_nbytes(outgoing, quota), _most_nbytes(incoming, quota), device_of(group)
        ),
        group,
    )
    failure: Exception | None = None
    for turn in range(turns):
        low, high = turn * quota, (turn + 1) * quota
        sends = [stream.cut(low, high) for stream in outgoing]
        receives = [stream.cut(low, high) for stream in incoming]
        # A rank that has failed joins the remaining rounds with arbitrary bytes, because the
        # others wait for it; all ranks agree on the failure at the end.
        if failure is None:
            parts = [own[a:b] for spans in sends for *_, a, b in spans]
            failure = attempt(functools.partial(buffers.fill, parts)).error
        send_sizes, receive_sizes = _sizes(sends), _sizes(receives)
        received = buffers.received[: sum(receive_sizes)]
        sent = buffers.sent[: sum(send_sizes)]
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
        if failure is None:
            failure = attempt(functools.partial(_hand_out, receives, received, take)).error
    together(functools.partial(_raise, failure), group)


def _most_nbytes(streams: list[Stream], quota: int) -> int:
    """Return the bytes of `streams` in the first round, which is the largest."""
    return sum(min(stream.nbytes, quota) for stream in streams)


def _sizes(cuts: list[list[Cut]]) -> list[int]:
    return [sum(b - a for *_, a, b in spans) for spans in cuts]


def _hand_out(receives: list[list[Cut]], received: torch.Tensor, take: Take) -> None:
    """Call `take` with every span of a round."""
    position = 0
    for peer, spans in enumerate(receives):
        for which, start, a, b in spans:
            part = received[position : position + b - a]
            # Only at an aligned place can bytes be viewed as elements.
            take(peer, which, start, part.clone() if position % ALIGNMENT else part)
            position += b - a


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
