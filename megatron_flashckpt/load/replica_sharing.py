"""Shared reads of replicas: one replica reads a chunk and sends it to the others, if faster.

Data-parallel replicas hold the same weights, so many replicas would read nearly all bytes many
times. Here every shared chunk has one reader among the replicas that need it. The reader verifies
the chunk before sending.

The faster way depends on the storage. From a local disk or the page cache, all replicas may as well
read everything; a file system that the whole job shares should serve each chunk once. `auto`
measures both ways in the first round and then decides. With many replicas `auto` always shares,
because each of them would open the files of all others.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron_flashckpt.collectives import Group, gather_objects, run_and_agree
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.load.all_to_all import ALIGNMENT, Stream, transfer
from megatron_flashckpt.load.checkpoint_source import ReadReport
from megatron_flashckpt.load.chunk_reader import ChunkReader, ChunkReads
from megatron_flashckpt.load.gpu_buffers import host_buffer, synchronize
from megatron_flashckpt.load.targets import Targets

#: Chunks that a replica reads per round (64 MiB) if its memory allows: enough to measure a speed.
#: With fewer chunks in total, measuring costs more than the faster way saves.
_CHUNKS_PER_ROUND = 64 * 2**20 // CHUNK_NBYTES

#: Lower bound in bytes of a replica's send buffer, and of its receive buffer.
_LEAST_ROOM = 2**20

#: With this many replicas `auto` always shares reads, without measuring.
MANY_REPLICAS = 64

_Chunk = tuple[int, int]
"""Source rank, and number of the chunk in that rank's shard."""

#: Bits of a chunk's number in a code; a shard has fewer chunks, because offsets are below 2**62.
_NUMBER_BITS = 41


@dataclasses.dataclass(frozen=True)
class ReplicaGroup:
    """The group of this rank's replicas, and the rules by which they share reads."""

    group: Group
    mode: str
    """`auto`, `always` or `never`; equal on all ranks."""
    memory_nbytes: int
    """Bytes for the buffers of this rank."""

    @property
    def measures(self) -> bool:
        """True if the measured speeds of reading and sending decide."""
        return self.mode == "auto" and dist.get_world_size(self.group) < MANY_REPLICAS


def read_with_replicas(
    reader: ChunkReader, chunks: list[ChunkReads], targets: Targets, sharing: ReplicaGroup
) -> ReadReport:
    """Read `chunks` into `targets`. Collective over the replicas.

    Raises:
        FlashCkptError: a replica could not read; on all replicas.
    """
    started = time.perf_counter()
    report = ReadReport(memory_nbytes=reader.nbytes)

    if (
        sharing.mode == "never"
        or not dist.is_initialized()
        or dist.get_world_size(sharing.group) < 2
    ):
        reader.read(chunks, targets)
    else:
        own_chunks = {(chunk.rank, chunk.number): chunk for chunk in chunks}
        # Ranks with more cores read with more threads and have less memory left.
        capacity = max(1, sharing.memory_nbytes // 3 // CHUNK_NBYTES)
        gathered = gather_objects((_codes(own_chunks).tobytes(), capacity), sharing.group)
        needs = [np.frombuffer(codes, np.int64) for codes, _ in gathered]
        per_round = min(_CHUNKS_PER_ROUND, *(member_capacity for _, member_capacity in gathered))
        is_worthwhile = not sharing.measures or max(map(len, needs)) >= _CHUNKS_PER_ROUND
        shared = _SharedChunks.of(needs if is_worthwhile else [])
        del gathered, needs
        others = own_chunks.keys() - set(shared.keys)
        unshared = [chunk for key, chunk in own_chunks.items() if key in others]
        run_and_agree(lambda: reader.read(unshared, targets), sharing.group)
        rounds = _Rounds(reader, own_chunks, shared, targets, sharing, report)
        rest = rounds.run(per_round)
        run_and_agree(
            lambda: reader.read([own_chunks[key] for key in rest], targets), sharing.group
        )
    synchronize()
    report.read_nbytes = reader.read_nbytes
    report.seconds = time.perf_counter() - started
    return report


def _codes(chunks: Iterable[_Chunk]) -> npt.NDArray[np.int64]:
    """Return one number per chunk. Thousands of replicas each need thousands of chunks."""
    return np.array([rank << _NUMBER_BITS | number for rank, number in chunks], np.int64)


@dataclasses.dataclass(frozen=True)
class _SharedChunks:
    """The chunks that at least two replicas need; equal on all replicas."""

    keys: list[_Chunk]
    needs: npt.NDArray[np.bool_]
    """For each chunk a row that says which replicas need it."""

    @classmethod
    def of(cls, needs: list[npt.NDArray[np.int64]]) -> _SharedChunks:
        """Return the shared chunks, from the codes of the chunks that each replica needs."""
        codes = np.concatenate([np.empty(0, np.int64), *needs])
        codes.sort()
        is_second = codes[1:] == codes[:-1]
        is_second[1:] &= ~is_second[:-1]
        shared = codes[1:][is_second]
        matrix = np.zeros((len(shared), len(needs)), np.bool_)
        for member, own_codes in enumerate(needs if len(shared) else []):
            positions = np.minimum(np.searchsorted(shared, own_codes), len(shared) - 1)
            matrix[positions[shared[positions] == own_codes], member] = True
        mask = (1 << _NUMBER_BITS) - 1
        return cls([(code >> _NUMBER_BITS, code & mask) for code in shared.tolist()], matrix)

    def assigned(self) -> list[list[int]]:
        """Return the positions of the chunks that each replica reads, with balanced loads."""
        lists: list[list[int]] = [[] for _ in range(self.needs.shape[1])]
        load = np.zeros(len(lists), np.int64)
        for position, row in enumerate(self.needs):
            members = np.flatnonzero(row)
            reader = int(members[np.argmin(load[members])])
            lists[reader].append(position)
            load[reader] += 1
        return lists

    def most_needed(self, positions: Iterable[int]) -> int:
        """Return the largest number of the chunks at `positions` that one replica needs."""
        return int(self.needs[list(positions)].sum(axis=0).max(initial=0))


class _Rounds:
    """Rounds in which every replica reads some of its chunks, and all exchange chunks they need."""

    def __init__(
        self,
        reader: ChunkReader,
        own_chunks: dict[_Chunk, ChunkReads],
        shared: _SharedChunks,
        targets: Targets,
        sharing: ReplicaGroup,
        report: ReadReport,
    ) -> None:
        self._reader = reader
        self._own_chunks = own_chunks
        self._shared = shared
        self._targets = targets
        self._sharing = sharing
        self._report = report
        group = sharing.group
        self._member, self._size = dist.get_rank(group), dist.get_world_size(group)
        #: Positions among the shared chunks, by the replica that reads them.
        self._lists = shared.assigned()

    def run(self, per_round: int) -> list[_Chunk]:
        """Run the rounds; return the chunks that this rank must still read after sharing stopped.

        Args:
            per_round: number of chunks that a replica reads in a round; equal on all replicas.
        """
        longest = max(map(len, self._lists), default=0)
        if not longest:
            return []
        per_round = min(per_round, longest)
        on_gpu = self._targets.gpu is not None
        buffer = run_and_agree(
            lambda: host_buffer(per_round * CHUNK_NBYTES, pinned=on_gpu), self._sharing.group
        )
        # In addition to the read buffer: one send buffer and one receive buffer.
        room = max((self._sharing.memory_nbytes - buffer.numel()) // 2, _LEAST_ROOM)
        self._report.memory_nbytes += buffer.numel() + 2 * room
        for first in range(0, longest, per_round):
            lists = [chunks[first : first + per_round] for chunks in self._lists]
            measured = first == 0 and self._sharing.measures
            if measured:
                self._connect(lists, buffer)
            read_s = self._read(lists[self._member], buffer)
            sent_s = self._send(lists, buffer, room)
            rest = [chunks[first + per_round :] for chunks in self._lists]
            if measured and not self._is_sharing_faster(lists, rest, read_s, sent_s):
                return [self._shared.keys[position] for position in self._needed_here(*rest)]
        self._report.shared = True
        return []

    def _needed_here(self, *lists: Sequence[int]) -> list[int]:
        """Return the positions in `lists` of the chunks that this replica needs, in order."""
        needs = self._shared.needs[:, self._member]
        return [position for position in itertools.chain(*lists) if needs[position]]

    def _read(self, chunks: list[int], buffer: torch.Tensor) -> float:
        """Read this rank's chunks of the round into `buffer` and `targets`; return the seconds."""
        started = time.perf_counter()
        keys = [self._shared.keys[position] for position in chunks]
        slots = {key: slot for slot, key in enumerate(keys)}
        view = buffer.numpy().data

        def keep(chunk: ChunkReads) -> memoryview:
            return view[slots[chunk.rank, chunk.number] * CHUNK_NBYTES :]

        work = [self._own_chunks[key] for key in keys]
        run_and_agree(lambda: self._reader.read(work, self._targets, keep), self._sharing.group)
        synchronize()  # the GPU's copies belong to this measurement
        return time.perf_counter() - started

    def _connect(self, lists: list[list[int]], buffer: torch.Tensor) -> None:
        """Send a few arbitrary bytes on each stream of a round.

        NCCL connects two ranks with their first message. The connection takes longer than the
        message and must not be measured.
        """
        outgoing, incoming = (
            {peer: Stream([(0, ALIGNMENT)]) for peer in streams} for streams in self._streams(lists)
        )
        transfer(
            buffer,
            outgoing,
            incoming,
            room=lambda: _LEAST_ROOM,
            take=lambda *_: None,
            group=self._sharing.group,
        )
        synchronize()

    def _send(self, lists: list[list[int]], buffer: torch.Tensor, room: int) -> float:
        started = time.perf_counter()
        outgoing, incoming = self._streams(lists)
        expected = [self._needed_here(chunks) for chunks in lists]

        def take(peer: int, number: int, start: int, part: torch.Tensor) -> None:
            self._report.received_nbytes += part.numel()
            key = self._shared.keys[expected[peer][number]]
            self._use(self._own_chunks[key], start, part)

        transfer(
            buffer, outgoing, incoming, room=lambda: room, take=take, group=self._sharing.group
        )
        synchronize()
        return time.perf_counter() - started

    def _streams(self, lists: list[list[int]]) -> tuple[dict[int, Stream], dict[int, Stream]]:
        """Return the streams that this rank sends and receives in a round, by replica."""
        others = [peer for peer in range(self._size) if peer != self._member]
        outgoing = {peer: self._stream(lists[self._member], peer) for peer in others}
        incoming = {peer: self._stream(lists[peer], self._member) for peer in others}
        return (
            {peer: stream for peer, stream in outgoing.items() if stream.nbytes},
            {peer: stream for peer, stream in incoming.items() if stream.nbytes},
        )

    def _stream(self, chunks: list[int], receiver: int) -> Stream:
        """Return the stream of those `chunks` in their reader's buffer that `receiver` needs."""
        return Stream(
            [
                (slot * CHUNK_NBYTES, self._reader.chunk_nbytes(*self._shared.keys[position]))
                for slot, position in enumerate(chunks)
                if self._shared.needs[position, receiver]
            ]
        )

    def _use(self, chunk: ChunkReads, start: int, part: torch.Tensor) -> None:
        """Put a part of a chunk, from byte `start` of the chunk on, into the targets."""
        begin = chunk.number * CHUNK_NBYTES + start
        for read in chunk.reads:
            low = max(read.source_offset, begin)
            high = min(read.source_offset + read.nbytes, begin + part.numel())
            if low < high:
                span = part[low - begin : high - begin]
                self._targets.put_tensor(read, low - read.source_offset, span)

    def _is_sharing_faster(
        self,
        lists: list[list[int]],
        rest: list[list[int]],
        read_s: float,
        sent_s: float,
    ) -> bool:
        """Return whether sharing is faster for the rest; equal on all replicas."""
        times = gather_objects((read_s, sent_s), self._sharing.group)
        slowest_read, slowest_send = (max(seconds) for seconds in zip(*times, strict=True))
        read_per_chunk = slowest_read / max(map(len, lists))
        needed = self._shared.most_needed(itertools.chain(*rest))
        moved = self._shared.most_needed(itertools.chain(*lists))
        sharing = max(map(len, rest)) * read_per_chunk + needed * slowest_send / max(moved, 1)
        return bool(sharing < needed * read_per_chunk)
