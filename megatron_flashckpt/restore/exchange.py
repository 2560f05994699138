"""Restore from the slots of all ranks: own bytes by copy, others' over the process group.

Replicated state is written once, by shares, so a rank's slot holds only its own part of it. After a
restart the parts are exchanged. All ranks call these functions together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_flashckpt.layout.coverage import ReadPlan
from megatron_flashckpt.restore.targets import Targets

#: Host (or device) memory that one rank uses for what it sends, and for what it receives.
ROUND_NBYTES = 64 * 1024 * 1024
#: The widest element.
_ALIGNMENT = 8


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's `value`, in rank order. Collective."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value`. Collective."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def exchange(own: torch.Tensor, rank: int, plan: ReadPlan, targets: Targets) -> int:
    """Fill `targets` from all ranks' slots; return the bytes that came from others. Collective.

    Args:
        own: the data section of this rank's slot, as flat uint8.
        plan: this rank's reads.
    """
    for index in plan.padded:
        targets.zero(index)
    for read in plan.reads.get(rank, []):
        source = own[read.source_offset : read.source_offset + read.nbytes]
        targets.put_tensor(read, 0, source)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return 0
    requests = {source: reads for source, reads in plan.reads.items() if source != rank}
    asked = gather_objects(
        {source: [(r.source_offset, r.nbytes) for r in reads] for source, reads in requests.items()}
    )
    outgoing = [_Stream(asked[peer].get(rank, [])) for peer in range(world)]
    incoming = [
        _Stream([(r.source_offset, r.nbytes) for r in requests.get(peer, [])])
        for peer in range(world)
    ]
    # Every rank derives the same quota and number of rounds from the same gathered requests.
    lengths = [_Stream(spans).nbytes for wish in asked for spans in wish.values()]
    if not lengths:
        return 0
    partners = max(1, max(len(wish) for wish in asked), *_senders(asked))
    quota = max(ROUND_NBYTES // partners // _ALIGNMENT, 1) * _ALIGNMENT
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    for turn in range(-(-max(lengths) // quota)):
        low, high = turn * quota, (turn + 1) * quota
        sends = [stream.cut(low, high) for stream in outgoing]
        receives = [stream.cut(low, high) for stream in incoming]
        parts = [own[a:b] for spans in sends for _, a, b in spans]
        to_send = torch.cat(parts) if parts else own[:0].clone()
        send_sizes = [sum(b - a for _, a, b in spans) for spans in sends]
        receive_sizes = [sum(b - a for _, a, b in spans) for spans in receives]
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=device)
        dist.all_to_all_single(received, to_send.to(device), receive_sizes, send_sizes)
        position = 0
        for peer, spans in enumerate(receives):
            for which, a, b in spans:
                read = requests[peer][which]
                part = received[position : position + b - a]
                # Only at an aligned place can bytes be viewed as elements.
                part = part.clone() if position % _ALIGNMENT else part
                targets.put_tensor(read, a - read.source_offset, part)
                position += b - a
    return sum(read.nbytes for reads in requests.values() for read in reads)


def _senders(asked: list[dict[int, list[tuple[int, int]]]]) -> list[int]:
    """Return how many partners each rank has to send to."""
    counts: dict[int, int] = {}
    for wish in asked:
        for source in wish:
            counts[source] = counts.get(source, 0) + 1
    return list(counts.values())


class _Stream:
    """Spans of a slot laid end to end: what one rank sends to one other, in order.

    Spans start at multiples of the widest element, so that no cut at such a multiple goes through
    an element.
    """

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self._spans = spans
        self.nbytes = sum(_aligned(nbytes) for _, nbytes in spans)

    def cut(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """Return `(which span, start, end)` in the slot for stream bytes `[low, high)`."""
        found = []
        position = 0
        for which, (offset, nbytes) in enumerate(self._spans):
            start, end = max(low, position), min(high, position + nbytes)
            if start < end:
                found.append((which, offset + start - position, offset + end - position))
            position += _aligned(nbytes)
        return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
