"""Carry out a read plan on storage: whole chunks, verified, straight into their destination.

Digests cover 4 MiB chunks, so a chunk is the least that can be read and trusted. Chunks are read
in the order of the files by a few threads, each with one buffer that it keeps: memory does not grow
with the checkpoint.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from megatron_flashckpt.layout.coverage import Read, ReadPlan
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.reshard import Run, overlap
from megatron_flashckpt.layout.shard_file import CHUNK_NBYTES, Shard
from megatron_flashckpt.restore.checkpoint import StoredCheckpoint


class Sink(Protocol):
    """Where verified bytes go: `restore.targets.Targets`, or whatever a tool makes of them."""

    def put(self, read: Read, offset: int, source: memoryview) -> None:
        """Take `source`, the bytes of `read.stored` from byte `offset` of `read` on.

        `source` is writable, and used for other things afterwards. Called by several threads, for
        different elements.
        """


class ChunkReads(NamedTuple):
    """A chunk of one rank's shard, and all that is wanted of it."""

    rank: int
    number: int
    reads: tuple[Read, ...]


def chunk_reads(plan: ReadPlan, wanted: list[Piece]) -> list[ChunkReads]:
    """Return the chunks that `plan` needs, in the order of ranks and files.

    A read that picks columns out of a matrix may step over whole chunks; these are left out.
    """
    needed: dict[tuple[int, int], list[Read]] = defaultdict(list)
    for rank, reads in plan.reads.items():
        for read in reads:
            first = read.source_offset // CHUNK_NBYTES
            last = (read.source_offset + read.nbytes - 1) // CHUNK_NBYTES
            for index in range(first, last + 1):
                if first < index < last and not _touches(read, index, wanted[read.wanted]):
                    continue
                needed[rank, index].append(read)
    return [ChunkReads(*chunk, tuple(needed[chunk])) for chunk in sorted(needed)]


def _touches(read: Read, index: int, piece: Piece) -> bool:
    size = itemsize(piece.dtype)
    low = read.stored.start + (index * CHUNK_NBYTES - read.source_offset) // size
    part = read.stored._replace(start=low, end=low + CHUNK_NBYTES // size)
    return overlap(part, Run.of(piece)).numel > 0


def deliver(chunk: ChunkReads, data: memoryview, sink: Sink) -> None:
    """Give `sink` what is wanted of `data`, the contents of `chunk`."""
    start = chunk.number * CHUNK_NBYTES
    for read in chunk.reads:
        low = max(read.source_offset, start)
        high = min(read.source_offset + read.nbytes, start + data.nbytes)
        sink.put(read, low - read.source_offset, data[low - start : high - start])


class ChunkReader:
    """Reads chunks of one checkpoint with `threads` threads. A context manager."""

    def __init__(self, stored: StoredCheckpoint, threads: int) -> None:
        self.stored = stored
        self.read_nbytes = 0
        #: Memory that the buffers take.
        self.nbytes = threads * CHUNK_NBYTES
        self._pool = concurrent.futures.ThreadPoolExecutor(threads)
        self._buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        for _ in range(threads):
            self._buffers.put(bytearray(CHUNK_NBYTES))
        self._shards: dict[int, Shard] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def read(
        self, chunks: Iterable[ChunkReads], use: Callable[[ChunkReads, memoryview], None]
    ) -> None:
        """Call `use(chunk, contents)` for all `chunks`, from several threads.

        The contents are good until `use` returns. Returns when all is done; after an error nothing
        of these chunks is still being read.

        Raises:
            CorruptCheckpointError: names file, chunk, bytes and both digests.
        """
        jobs = [self._pool.submit(self._one, chunk, use) for chunk in chunks]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            concurrent.futures.wait(jobs)
            raise

    def _one(self, chunk: ChunkReads, use: Callable[[ChunkReads, memoryview], None]) -> None:
        buffer = self._buffers.get()
        try:
            data = self.stored.chunk(self._shard(chunk.rank), chunk.number, buffer)
            use(chunk, data)
            with self._lock:
                self.read_nbytes += data.nbytes
        finally:
            self._buffers.put(buffer)

    def _shard(self, rank: int) -> Shard:
        shard = self._shards.get(rank)
        if shard is None:  # two threads may both look: the same header twice does no harm
            shard = self._shards[rank] = self.stored.shard(rank)
        return shard


def read_all(
    stored: StoredCheckpoint, plan: ReadPlan, wanted: list[Piece], sink: Sink, threads: int
) -> int:
    """Carry out `plan`, this rank alone; return the bytes read.

    Raises:
        CorruptCheckpointError: names file, chunk, bytes and both digests.
    """
    with ChunkReader(stored, threads) as reader:
        reader.read(chunk_reads(plan, wanted), lambda chunk, data: deliver(chunk, data, sink))
        return reader.read_nbytes
