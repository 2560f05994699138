"""Carry out a read plan: whole chunks, verified, straight into their destination.

Digests cover 4 MiB chunks, so a chunk is the least that can be read and trusted. Chunks are read
in the order of the files by a few threads. What is wanted of a chunk in one stretch is read to
where it belongs, and digested there; the rest goes through a buffer that each thread keeps, so
memory does not grow with the checkpoint. So bytes may be in place when their digest turns out to be
wrong: then the read as a whole fails, and nothing that it has filled counts.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from megatron_flashckpt.config import Config
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import Read, ReadPlan
from megatron_flashckpt.layout.reshard import Run, overlap

if TYPE_CHECKING:
    from megatron_flashckpt.load.gpu_buffers import Gpu

#: Smaller stretches go through the buffer: a call per piece would cost more than their copy.
_PLACED_NBYTES = 16 * 1024
#: Threads of a rank, unless more are asked for: most storages do not serve more of them faster.
_MOST_THREADS = 4


class Part(NamedTuple):
    """Bytes that were read and verified."""

    read: Read
    offset: int
    """From which byte of `read` on."""
    source: memoryview
    """Writable, and used for other things afterwards."""


class Sink(Protocol):
    """Where bytes go: `load.targets.Targets`, or whatever a tool makes of them.

    Called by several threads, for different elements.
    """

    def place(self, read: Read, offset: int, nbytes: int) -> memoryview | None:
        """Return the memory that is to hold `nbytes` bytes of `read.stored` from byte `offset` of
        `read` on; None: `put` shall have them.
        """

    def put(self, parts: list[Part]) -> None:
        """Take the parts of one or more reads that lie in one chunk.

        The caller may overwrite the sources when this returns.
        """


class ChunkSource(Protocol):
    """The data sections of all ranks, wherever they are. Used by several threads."""

    def data_nbytes(self, rank: int) -> int:
        """Return the length of the data section of a rank."""

    def read_chunk(self, rank: int, number: int, parts: Sequence[memoryview]) -> None:
        """Fill `parts`, end to end, with a chunk, and verify it.

        Raises:
            CorruptCheckpointError: names place, chunk and both digests.
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
    if parts := [_part(chunk, read, data) for read in chunk.reads]:
        sink.put(parts)


def _part(chunk: ChunkReads, read: Read, data: memoryview) -> Part:
    start = chunk.number * CHUNK_NBYTES
    low, high = _within(read, start, data.nbytes)
    return Part(read, start + low - read.source_offset, data[low:high])


def _within(read: Read, start: int, nbytes: int) -> tuple[int, int]:
    """Return which bytes of a chunk of `nbytes`, which begins at `start`, `read` takes."""
    low = max(read.source_offset, start)
    high = min(read.source_offset + read.nbytes, start + nbytes)
    return low - start, high - start


def _laid_out(
    chunk: ChunkReads, buffer: memoryview, sink: Sink
) -> tuple[list[memoryview], list[Part]]:
    """Return the memory that is to hold `chunk`, end to end, and what is then to be delivered.

    Args:
        buffer: as long as the chunk; a byte that is not placed goes where the chunk has it.
    """
    start, nbytes = chunk.number * CHUNK_NBYTES, buffer.nbytes
    memory: list[memoryview] = []
    rest = []
    placed = buffered = 0
    for read in chunk.reads:
        low, high = _within(read, start, nbytes)
        if low < placed:  # some bytes are wanted twice
            return [buffer], [_part(chunk, each, buffer) for each in chunk.reads]
        view = None
        if low >= buffered and high - low >= _PLACED_NBYTES:
            view = sink.place(read, start + low - read.source_offset, high - low)
        if view is None:
            rest.append(Part(read, start + low - read.source_offset, buffer[low:high]))
            buffered = max(buffered, high)
        else:
            memory += [buffer[placed:low], view]
            placed = high
    return [*memory, buffer[placed:]], rest


class ChunkReader:
    """Reads chunks of one checkpoint with `threads` threads. A context manager.

    A single one is the caller's: no other has to wake up, or to wait for the interpreter's lock.

    Args:
        gpu: the GPU that the sink copies to; None: host memory. For a GPU, buffers are page-locked,
            and all threads use its device and stream.
    """

    def __init__(self, source: ChunkSource, threads: int, gpu: Gpu | None = None) -> None:
        self.source = source
        self.read_nbytes = 0
        #: Memory that the buffers take, if all that is read goes through them.
        self.nbytes = threads * CHUNK_NBYTES
        self._pool = None
        if threads > 1:
            enter = None if gpu is None else gpu.enter_thread
            self._pool = concurrent.futures.ThreadPoolExecutor(threads, initializer=enter)
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        make = _host_memory if gpu is None else gpu.host_memory
        for _ in range(threads):
            self._buffers.put(make(CHUNK_NBYTES))
        self._lock = threading.Lock()

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def read(
        self,
        chunks: Iterable[ChunkReads],
        sink: Sink,
        keep: Callable[[ChunkReads], memoryview] | None = None,
    ) -> None:
        """Give `sink` what is wanted of all `chunks`, from several threads.

        Returns when all is done; after an error nothing of these chunks is still being read.

        Args:
            keep: returns memory, at least as long as the chunk, that is to hold it as a whole.

        Raises:
            CorruptCheckpointError: names place, chunk and both digests.
        """
        if self._pool is None:
            for chunk in chunks:
                self._one(chunk, sink, keep)
            return
        jobs = [self._pool.submit(self._one, chunk, sink, keep) for chunk in chunks]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            concurrent.futures.wait(jobs)
            raise

    def _one(
        self, chunk: ChunkReads, sink: Sink, keep: Callable[[ChunkReads], memoryview] | None
    ) -> None:
        whole = self.source.data_nbytes(chunk.rank)
        nbytes = min(CHUNK_NBYTES, whole - chunk.number * CHUNK_NBYTES)
        buffer = self._buffers.get()
        try:
            if keep is None:
                memory, rest = _laid_out(chunk, buffer[:nbytes], sink)
                self.source.read_chunk(chunk.rank, chunk.number, memory)
                if rest:
                    sink.put(rest)
            else:
                data = keep(chunk)[:nbytes]
                self.source.read_chunk(chunk.rank, chunk.number, [data])
                deliver(chunk, data, sink)
            with self._lock:
                self.read_nbytes += nbytes
        finally:
            self._buffers.put(buffer)


def reader_threads(config: Config) -> int:
    """Return how many chunks this rank reads at the same time."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // ranks)
    # One rank on two cores loads with two threads in 0.72 to 0.95 of the time of one, for a quarter
    # more CPU time, which nothing else needs during a load. Two threads on one core gain nothing.
    threads = config.read_threads or min(cores, _MOST_THREADS)
    return max(1, min(threads, config.read_memory_mib * 2**20 // 2 // CHUNK_NBYTES))


def _host_memory(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data


def read_all(
    source: ChunkSource,
    plan: ReadPlan,
    wanted: list[Piece],
    sink: Sink,
    threads: int,
    gpu: Gpu | None = None,
) -> int:
    """Carry out `plan`, this rank alone; return the bytes read. `gpu`: see `ChunkReader`.

    Raises:
        CorruptCheckpointError: names place, chunk and both digests.
    """
    with ChunkReader(source, threads, gpu) as reader:
        reader.read(chunk_reads(plan, wanted), sink)
        return reader.read_nbytes
