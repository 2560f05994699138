"""Restore from the slots of all ranks: own bytes straight, others' over the process group.

Replicated state is written once, by shares, so a rank's slot holds only its own part of it. After a
restart the parts are exchanged. All ranks call these functions together. Each asks only the ranks
that hold what it lacks; all that every rank learns of every other is one bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_flashckpt.collectives import Group, device_of, gather_named, together
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.failpoints import reach
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import ReadPlan
from megatron_flashckpt.load.all_to_all import Span, Stream, send_and_receive, transfer
from megatron_flashckpt.load.chunk_reader import ChunkReader, ChunkReads, chunk_reads
from megatron_flashckpt.load.gpu_buffers import synchronize
from megatron_flashckpt.load.targets import Targets

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
    askers, is_any = gather_named(requests)
    if is_any:
        _in_group_of_its_own(
            lambda group: _exchange(reader, own, rank, plan, wanted, targets, askers, group)
        )
    else:
        together(lambda: reader.read(_own_chunks(rank, plan, wanted, []), targets))
        reach("load.half")
    synchronize()
    return sum(read.nbytes for reads in requests.values() for read in reads)


def _exchange(
    reader: ChunkReader,
    own: torch.Tensor,
    rank: int,
    plan: ReadPlan,
    wanted: list[Piece],
    targets: Targets,
    askers: list[int],
    group: Group,
) -> None:
    """Do what `exchange` does, in a group of all ranks. Collective."""
    requests = {source: reads for source, reads in plan.reads.items() if source != rank}
    wishes = {
        source: [(read.source_offset, read.nbytes) for read in reads]
        for source, reads in requests.items()
    }
    asked = _ask(wishes, askers, group)
    spans = [span for of_peer in asked.values() for span in of_peer]

    def read() -> int:
        # Whether all ranks have verified what they send is agreed on with the size of a round.
        reader.read(_own_chunks(rank, plan, wanted, spans), targets)
        reach("load.half")
        return _round_nbytes()

    def take(peer: int, which: int, start: int, part: torch.Tensor) -> None:
        targets.put_tensor(requests[peer][which], start, part)

    outgoing = {peer: Stream(of_peer) for peer, of_peer in asked.items()}
    incoming = {source: Stream(of_source) for source, of_source in wishes.items()}
    transfer(own, outgoing, incoming, room=read, take=take, group=group)


def _ask(
    wishes: Mapping[int, Sequence[Span]], askers: Sequence[int], group: Group
) -> dict[int, list[Span]]:
    """Return what each of `askers` wants of this rank, in its order. Collective.

    Args:
        wishes: by peer, what this rank wants of it.
        askers: the ranks in whose wishes this one is.

    Raises:
        FlashCkptError: on all ranks, if one has no memory for the requests.
    """
    device = device_of(group)
    # All ranks join in this before the first message: it connects the group.
    counted, counts = together(
        lambda: (
            torch.tensor([len(spans) for spans in wishes.values()], dtype=torch.int64).to(device),
            torch.zeros(len(askers), dtype=torch.int64).to(device),
        ),
        group,
    )
    send_and_receive(
        _by_peer(counted, wishes, [1] * len(wishes)),
        _by_peer(counts, askers, [1] * len(askers)),
        group,
    )

    def made() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        numbers = [number for spans in wishes.values() for span in spans for number in span]
        lengths = [2 * count for count in counts.cpu().tolist()]
        received = torch.zeros(sum(lengths), dtype=torch.int64)
        return torch.tensor(numbers, dtype=torch.int64).to(device), received.to(device), lengths

    sent, received, lengths = together(made, group)
    send_and_receive(
        _by_peer(sent, wishes, [2 * len(spans) for spans in wishes.values()]),
        _by_peer(received, askers, lengths),
        group,
    )
    numbers = iter(received.cpu().tolist())
    spans = zip(numbers, numbers, strict=True)
    return {
        peer: list(itertools.islice(spans, length // 2))
        for peer, length in zip(askers, lengths, strict=True)
    }


def _by_peer(
    numbers: torch.Tensor, peers: Iterable[int], lengths: list[int]
) -> dict[int, torch.Tensor]:
    """Return the part of `numbers` for each peer, one after the other."""
    return dict(zip(peers, torch.split(numbers, lengths), strict=True)) if lengths else {}


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


def _round_nbytes() -> int:
    """Return the bytes that a round may send or receive on this rank.

    Both buffers take half of the GPU's free memory; NCCL's connections need some of the rest.
    """
    if not sends_from_gpu():
        return ROUND_NBYTES
    return min(ROUND_NBYTES, max(free_gpu_nbytes() // 4, LEAST_ROUND_NBYTES))


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
