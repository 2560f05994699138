"""Restore from the slots of all ranks: own bytes straight, others' over the process group.

Replicated state is written once, by shares, so a rank's slot holds only its own part of it. After a
restart the parts are exchanged. All ranks call these functions together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.faults import reach
from megatron_flashckpt.layout.coverage import ReadPlan
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.shard_file import CHUNK_NBYTES
from megatron_flashckpt.restore.collectives import Group, device_of, gathered, together
from megatron_flashckpt.restore.gpu import synchronize
from megatron_flashckpt.restore.reader import ChunkReader, ChunkReads, chunk_reads
from megatron_flashckpt.restore.targets import Targets
from megatron_flashckpt.restore.transfer import ALIGNMENT, Span, Stream, transfer

#: Memory that one rank uses for what it sends in a round, and again for what it receives.
ROUND_NBYTES = 64 * 1024 * 1024
#: Lower bound of that memory on a GPU that is nearly full; smaller rounds would take too long.
LEAST_ROUND_NBYTES = 1024 * 1024


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
        FlashCkptError: on all ranks, if one has no memory for its buffers, or cannot copy.
    """
    requests = {source: reads for source, reads in plan.reads.items() if source != rank}

    def look() -> tuple[None, tuple[dict[int, list[Span]], int | None]]:
        spans = {
            source: [(r.source_offset, r.nbytes) for r in reads]
            for source, reads in requests.items()
        }
        return None, (spans, free_gpu_nbytes() if sends_from_gpu() else None)

    _, everyone = gathered(look)
    asked = [wish for wish, _ in everyone]
    world = len(asked)
    spans = [span for wish in asked for span in wish.get(rank, [])]
    together(lambda: reader.read(_own_chunks(rank, plan, wanted, spans), targets))
    reach("load.half")
    outgoing = [Stream(asked[peer].get(rank, [])) for peer in range(world)]
    incoming = [
        Stream([(r.source_offset, r.nbytes) for r in requests.get(peer, [])])
        for peer in range(world)
    ]

    def take(peer: int, which: int, start: int, part: torch.Tensor) -> None:
        targets.put_tensor(requests[peer][which], start, part)

    # Every rank derives the same quota and number of rounds from the same gathered requests.
    lengths = [Stream(spans).nbytes for wish in asked for spans in wish.values()]
    if lengths:
        partners = max(1, max(len(wish) for wish in asked), *_senders(asked))
        round_nbytes = _round_nbytes([room for _, room in everyone])
        quota = max(round_nbytes // partners // ALIGNMENT, 1) * ALIGNMENT
        turns = -(-max(lengths) // quota)
        _in_group_of_its_own(
            lambda group: transfer(
                own, outgoing, incoming, turns=turns, quota=quota, take=take, group=group
            )
        )
    synchronize()
    return sum(read.nbytes for reads in requests.values() for read in reads)


def buffers_nbytes() -> int:
    """Return an upper bound of the host and GPU memory for an exchange's buffers on this rank."""
    return (3 if sends_from_gpu() else 2) * ROUND_NBYTES


def sends_from_gpu() -> bool:
    """Return whether ranks exchange bytes between GPUs; equal on all ranks."""
    return dist.is_initialized() and device_of(None) == "cuda"


def free_gpu_nbytes() -> int:
    """Return how many bytes of this rank's GPU are free.

    First frees the memory that PyTorch keeps for later allocations, because NCCL cannot use it.
    """
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _round_nbytes(rooms: list[int | None]) -> int:
    """Return the bytes of a round.

    Both buffers take half of the fullest GPU's free memory; NCCL's connections need some of the
    rest.

    Args:
        rooms: free bytes of each rank's GPU; None: no GPU is used.
    """
    least = min((room for room in rooms if room is not None), default=None)
    if least is None:
        return ROUND_NBYTES
    return min(ROUND_NBYTES, max(least // 4, LEAST_ROUND_NBYTES))


def _in_group_of_its_own(work: Callable[[Group], None]) -> None:
    """Run `work(group)`; with NCCL in a group of all ranks that ends with it. Collective.

    The first message between two GPUs connects them, and the connection keeps GPU memory for as
    long as its group lives. In the job's own group that is until the job ends: a job that fills its
    GPUs would fit when it starts anew, and not after a restart. A group costs one communicator's
    start, some tenths of a second and more on thousands of ranks.
    """
    if not sends_from_gpu():
        work(None)
        return
    group = dist.new_group()
    try:
        work(group)
    except FlashCkptError:
        # All ranks raise a FlashCkptError together. After other errors some ranks may hang in a
        # collective of the group, and `destroy_process_group` would wait for them.
        dist.destroy_process_group(group)
        raise
    dist.destroy_process_group(group)


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
