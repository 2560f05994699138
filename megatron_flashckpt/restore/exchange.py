"""Restore from the slots of all ranks: own bytes by copy, others' over the process group.

Replicated state is written once, by shares, so a rank's slot holds only its own part of it. After a
restart the parts are exchanged. All ranks call these functions together.
"""

from __future__ import annotations

import concurrent.futures

import torch
import torch.distributed as dist

from megatron_flashckpt.faults import reach
from megatron_flashckpt.layout.coverage import Read, ReadPlan
from megatron_flashckpt.restore.collectives import gather_objects
from megatron_flashckpt.restore.targets import Targets
from megatron_flashckpt.restore.transfer import ALIGNMENT, Stream, transfer

#: Host (or device) memory that one rank uses for what it sends, and for what it receives.
ROUND_NBYTES = 64 * 1024 * 1024


def exchange(
    own: torch.Tensor, rank: int, plan: ReadPlan, targets: Targets, threads: int = 1
) -> int:
    """Fill `targets` from all ranks' slots; return the bytes that came from others. Collective.

    Args:
        own: the data section of this rank's slot, as flat uint8.
        plan: this rank's reads.
        threads: that copy what is this rank's own.
    """

    def put(read: Read) -> None:
        source = own[read.source_offset : read.source_offset + read.nbytes]
        targets.put_tensor(read, 0, source)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(put, plan.reads.get(rank, [])))
    reach("load.half")
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return 0
    requests = {source: reads for source, reads in plan.reads.items() if source != rank}
    asked = gather_objects(
        {source: [(r.source_offset, r.nbytes) for r in reads] for source, reads in requests.items()}
    )
    outgoing = [Stream(asked[peer].get(rank, [])) for peer in range(world)]
    incoming = [
        Stream([(r.source_offset, r.nbytes) for r in requests.get(peer, [])])
        for peer in range(world)
    ]
    # Every rank derives the same quota and number of rounds from the same gathered requests.
    lengths = [Stream(spans).nbytes for wish in asked for spans in wish.values()]
    if not lengths:
        return 0
    partners = max(1, max(len(wish) for wish in asked), *_senders(asked))
    quota = max(ROUND_NBYTES // partners // ALIGNMENT, 1) * ALIGNMENT

    def take(peer: int, which: int, start: int, part: torch.Tensor) -> None:
        targets.put_tensor(requests[peer][which], start, part)

    turns = -(-max(lengths) // quota)
    transfer(own, outgoing, incoming, turns=turns, quota=quota, take=take)
    return sum(read.nbytes for reads in requests.values() for read in reads)


def _senders(asked: list[dict[int, list[tuple[int, int]]]]) -> list[int]:
    """Return how many partners each rank has to send to."""
    counts: dict[int, int] = {}
    for wish in asked:
        for source in wish:
            counts[source] = counts.get(source, 0) + 1
    return list(counts.values())
