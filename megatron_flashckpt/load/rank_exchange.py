"""A load from the slots of all ranks: a node's bytes are copied, other nodes' are exchanged.

Replicated state is saved once, in shares, so a rank's slot holds only its own share. After a
restart each rank reads the slots of its node, and ranks of different nodes exchange their shares
over the process group. All ranks call these functions together. A rank sends requests only to the
ranks that hold its missing bytes; beyond that, one bit per pair of ranks is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_flashckpt.collectives import Group, device_of, gather_named, run_and_agree
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import Read, ReadPlan
from megatron_flashckpt.load.all_to_all import Span, Stream, send_and_receive, transfer
from megatron_flashckpt.load.chunk_reader import ChunkReader, ChunkReads, chunk_reads
from megatron_flashckpt.load.gpu_buffers import synchronize
from megatron_flashckpt.load.targets import Targets

#: Bytes of a rank's send buffer for a round, and of its receive buffer.
ROUND_NBYTES = 64 * 1024 * 1024
#: Lower bound of these buffers on a GPU that is nearly full; smaller rounds would take too long.
LEAST_ROUND_NBYTES = 1024 * 1024


def exchange(
    reader: ChunkReader,
    own: torch.Tensor,
    rank: int,
    plan: ReadPlan,
    wanted: list[Piece],
    targets: Targets,
    readable: Collection[int] = (),
) -> int:
    """Fill `targets` from all ranks' slots; return the bytes received from others. Collective.

    Args:
        reader: reads the slots of `readable`.
        own: the data section of this rank's slot, as flat uint8.
        plan: this rank's reads, which fill `wanted`.
        readable: other ranks whose slots this rank reads itself.

    Raises:
        CorruptCheckpointError: requested bytes of a slot differ from the staged bytes; on all
            ranks.
        FlashCkptError: a rank lacks memory for its buffers, or cannot copy; on all ranks.
    """
    near = {rank, *readable}
    requests = {source: reads for source, reads in plan.reads.items() if source not in near}
    reads = {source: reads for source, reads in plan.reads.items() if source in near}
    chunks = chunk_reads(ReadPlan(reads, ()), wanted)
    askers, is_any = gather_named(requests)
    if is_any:
        _in_temporary_group(
            lambda group: _exchange(reader, own, rank, chunks, requests, targets, askers, group)
        )
    else:
        run_and_agree(lambda: reader.read(chunks, targets))
        hit("load.half")
    synchronize()
    return sum(read.nbytes for reads in requests.values() for read in reads)


def _exchange(
    reader: ChunkReader,
    own: torch.Tensor,
    rank: int,
    chunks: list[ChunkReads],
    requests: dict[int, list[Read]],
    targets: Targets,
    askers: list[int],
    group: Group,
) -> None:
    """Read `chunks`, and exchange `requests` in `group`, which has all ranks. Collective."""
    requested = {
        source: [(read.source_offset, read.nbytes) for read in reads]
        for source, reads in requests.items()
    }
    to_send = _exchange_requests(requested, askers, group)
    spans = [span for peer_spans in to_send.values() for span in peer_spans]

    def read() -> int:
        # `transfer` agrees on the round sizes, and there also on the success of these reads.
        reader.read(chunks + _sent_only(rank, chunks, spans), targets)
        hit("load.half")
        return _round_nbytes()

    def take(peer: int, number: int, start: int, part: torch.Tensor) -> None:
        targets.put_tensor(requests[peer][number], start, part)

    outgoing = {peer: Stream(peer_spans) for peer, peer_spans in to_send.items()}
    incoming = {source: Stream(source_spans) for source, source_spans in requested.items()}
    transfer(own, outgoing, incoming, room=read, take=take, group=group)


def _exchange_requests(
    requested: Mapping[int, Sequence[Span]], askers: Sequence[int], group: Group
) -> dict[int, list[Span]]:
    """Return the spans that each of `askers` requests of this rank, in their order. Collective.

    Args:
        requested: the spans that this rank requests, by peer.
        askers: the ranks that request spans of this rank.

    Raises:
        FlashCkptError: a rank lacks memory for the requests; on all ranks.
    """
    device = device_of(group)
    # All ranks call this before the first message, because it connects the group.
    own_counts, counts = run_and_agree(
        lambda: (
            torch.tensor([len(spans) for spans in requested.values()], dtype=torch.int64).to(
                device
            ),
            torch.zeros(len(askers), dtype=torch.int64).to(device),
        ),
        group,
    )
    send_and_receive(
        _by_peer(own_counts, requested, [1] * len(requested)),
        _by_peer(counts, askers, [1] * len(askers)),
        group,
    )

    def make_messages() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        numbers = [number for spans in requested.values() for span in spans for number in span]
        lengths = [2 * count for count in counts.cpu().tolist()]
        received = torch.zeros(sum(lengths), dtype=torch.int64)
        return torch.tensor(numbers, dtype=torch.int64).to(device), received.to(device), lengths

    sent, received, lengths = run_and_agree(make_messages, group)
    send_and_receive(
        _by_peer(sent, requested, [2 * len(spans) for spans in requested.values()]),
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
    """Return the consecutive parts of `numbers`, one for each peer."""
    return dict(zip(peers, torch.split(numbers, lengths), strict=True)) if lengths else {}


def buffers_nbytes() -> int:
    """Return an upper bound of the host and GPU memory for an exchange's buffers on this rank."""
    return (3 if sends_from_gpu() else 2) * ROUND_NBYTES


def sends_from_gpu() -> bool:
    """Return whether ranks exchange bytes between GPUs; equal on all ranks."""
    return dist.is_initialized() and device_of(None) == "cuda"


def free_gpu_nbytes() -> int:
    """Return the free bytes of this rank's GPU.

    First frees the memory that PyTorch keeps for later allocations, because NCCL cannot use it.
    """
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _round_nbytes() -> int:
    """Return the bytes that a round may send, or receive, on this rank.

    Both buffers together take half of the GPU's free memory; NCCL's connections need some of the
    rest.
    """
    if not sends_from_gpu():
        return ROUND_NBYTES
    return min(ROUND_NBYTES, max(free_gpu_nbytes() // 4, LEAST_ROUND_NBYTES))


def _in_temporary_group(work: Callable[[Group], None]) -> None:
    """Run `work(group)`; with NCCL, in a temporary group of all ranks. Collective.

    The first message between two GPUs connects them, and the connection keeps GPU memory until its
    group is destroyed. In the job's own group, that memory would be missing until the job ends. A
    job that fills its GPUs would then fit after a fresh start, but not after a restart. A new group
    costs the start of one communicator: tenths of a second, and more on thousands of ranks.
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


def _sent_only(rank: int, chunks: list[ChunkReads], spans: list[Span]) -> list[ChunkReads]:
    """Return the chunks of this rank's slot that hold others' `spans` and are not in `chunks`."""
    covered = {chunk.number for chunk in chunks if chunk.rank == rank}
    sent = {
        number
        for offset, nbytes in spans
        for number in range(offset // CHUNK_NBYTES, -(-(offset + nbytes) // CHUNK_NBYTES))
    }
    return [ChunkReads(rank, number, ()) for number in sorted(sent - covered)]
