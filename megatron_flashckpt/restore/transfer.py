"""Spans of every rank's buffer to the ranks that want them, in rounds of bounded size."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_flashckpt.restore.collectives import Group

#: The widest element.
ALIGNMENT = 8

Span = tuple[int, int]
"""Offset in the sender's buffer, bytes."""


class Stream:
    """Spans of a buffer laid end to end: what one rank sends to one other, in order.

    Spans start at multiples of the widest element, so that no cut at such a multiple goes through
    an element.
    """

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self.nbytes = sum(_aligned(nbytes) for _, nbytes in spans)

    def cut(self, low: int, high: int) -> list[tuple[int, int, int, int]]:
        """Return `(span, start in it, start and end in the buffer)` for stream bytes `[low, high)`.

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


def transfer(
    own: torch.Tensor,
    outgoing: list[Stream],
    incoming: list[Stream],
    *,
    turns: int,
    quota: int,
    take: Callable[[int, int, int, torch.Tensor], None],
    group: Group = None,
) -> None:
    """Send `outgoing[peer]` to every peer and take what they send. Collective.

    Args:
        own: this rank's buffer, flat uint8.
        incoming: the spans that each peer sends here, as it sees them.
        turns, quota: rounds, and bytes per pair of ranks and round (a multiple of `ALIGNMENT`);
            alike on all ranks.
        take: called with peer, span, start in the span, and the bytes (aligned, not kept).
    """
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    for turn in range(turns):
        low, high = turn * quota, (turn + 1) * quota
        sends = [stream.cut(low, high) for stream in outgoing]
        receives = [stream.cut(low, high) for stream in incoming]
        parts = [own[a:b] for spans in sends for *_, a, b in spans]
        to_send = torch.cat(parts) if parts else own[:0].clone()
        send_sizes = [sum(b - a for *_, a, b in spans) for spans in sends]
        receive_sizes = [sum(b - a for *_, a, b in spans) for spans in receives]
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=device)
        dist.all_to_all_single(received, to_send.to(device), receive_sizes, send_sizes, group=group)
        position = 0
        for peer, spans in enumerate(receives):
            for which, start, a, b in spans:
                part = received[position : position + b - a]
                # Only at an aligned place can bytes be viewed as elements.
                take(peer, which, start, part.clone() if position % ALIGNMENT else part)
                position += b - a
