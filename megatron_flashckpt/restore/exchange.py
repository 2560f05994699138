"""Restore from the slots of all ranks: own bytes straight, others' over the process group.

Replicated state is written once, by shares, so a rank's slot holds only its own part of it. After a
restart the parts are exchanged. All ranks call these functions together.
"""

from __future__ import annotations

import torch

from megatron_flashckpt.faults import reach
from megatron_flashckpt.layout.coverage import ReadPlan
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.shard_file import CHUNK_NBYTES
from megatron_flashckpt.restore.collectives import gather_objects, together
from megatron_flashckpt.restore.reader import ChunkReader, ChunkReads, chunk_reads
from megatron_flashckpt.restore.targets import Targets
from megatron_flashckpt.restore.transfer import ALIGNMENT, Span, Stream, transfer

#: Host (or device) memory that one rank uses for what it sends, and for what it receives.
ROUND_NBYTES = 64 * 1024 * 1024


def exchange(
    reader: ChunkReader,
    own: torch.Tensor,
    rank: int,
    plan: ReadPlan,
    wanted: list[Piece],
    targets: Targets,
) -> int:
    """Fill `targets` from all ranks' slots; return the bytes that came from others. Collective.

    Args:
        reader: of this rank's slot.
        own: the data section of this rank's slot, as flat uint8.
        plan: this rank's reads, which fill `wanted`.

    Raises:
        CorruptCheckpointError: on all ranks, if what any of them wants of its own slot, or others
            want of it, is not what was staged.
    """
    requests = {source: reads for source, reads in plan.reads.items() if source != rank}
    asked = gather_objects(
        {source: [(r.source_offset, r.nbytes) for r in reads] for source, reads in requests.items()}
    )
    world = len(asked)
    spans = [span for wish in asked for span in wish.get(rank, [])]
    together(lambda: reader.read(_own_chunks(rank, plan, wanted, spans), targets))
    reach("load.half")
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


def _own_chunks(
    rank: int, plan: ReadPlan, wanted: list[Piece], spans: list[Span]
) -> list[ChunkReads]:
    """Return the chunks of this rank's slot that it needs, or that `spans`, for others, lie in."""
    mine = chunk_reads(ReadPlan({rank: plan.reads.get(rank, [])}, ()), wanted)
    covered = {chunk.number for chunk in mine}
    sent = {
        number
        for offset, nbytes in spans
        for number in range(offset // CHUNK_NBYTES, -(-(offset + nbytes) // CHUNK_NBYTES))
    }
    return mine + [ChunkReads(rank, number, ()) for number in sorted(sent - covered)]


def _senders(asked: list[dict[int, list[Span]]]) -> list[int]:
    """Return how many partners each rank has to send to."""
    counts: dict[int, int] = {}
    for wish in asked:
        for source in wish:
            counts[source] = counts.get(source, 0) + 1
    return list(counts.values())
