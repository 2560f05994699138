"""Execution of a read plan: whole chunks are read, verified and put into their destination.

Digests cover 4 MiB chunks, so a chunk is the smallest unit that can be verified. A few threads read
the chunks in the order of the files. Long contiguous reads of a chunk go straight to their
destination and are digested there. The rest goes through one buffer per thread, so memory use does
not grow with the checkpoint. If a digest is wrong, some bytes may be in place already; the whole
read then fails, and the caller discards all tensors that it filled.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from megatron_flashckpt.config import Config
from megatron_flashckpt.cpu_list import cpus_of_rank
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import Read, ReadPlan
from megatron_flashckpt.layout.reshard import Run, overlap
from megatron_flashckpt.load.gpu_buffers import Gpu, host_buffer

#: Shorter reads go through the buffer, because a system call would cost more than the copy.
_PLACED_NBYTES = 16 * 1024
#: Default upper bound of threads per rank: most storages do not serve more threads faster.
_MOST_THREADS = 4
#: Adjacent chunks that one thread takes in place: 32 MiB, which a GPU copies in 0.6 ms. Fewer would
#: need more steps of Python, in which all threads wait for the interpreter lock.
_MOST_ADJACENT = 8


class Part(NamedTuple):
    """Bytes of one read, verified before or, in place, meanwhile."""

    read: Read
    offset: int
    """First byte, counted from the start of `read`."""
    source: memoryview
    """The bytes; the memory is writable and is reused afterwards."""


class Sink(Protocol):
    """Receiver of the bytes: `load.targets.Targets`, or a sink of another tool.

    Called by several threads, for different elements.
    """

    def place(self, read: Read, offset: int, nbytes: int) -> memoryview | None:
        """Return the destination of `nbytes` bytes of `read` from byte `offset` on.

        Returns None if the sink takes these bytes by `put`.
        """

    def put(self, parts: list[Part]) -> None:
        """Take the parts of one or more reads of one chunk.

        The caller may overwrite the sources when this returns.
        """


class ChunkSource(Protocol):
    """The data sections of all ranks, in memory or storage. Used by several threads."""

    def data_nbytes(self, rank: int) -> int:
        """Return the length of the data section of a rank."""

    def read_chunk(self, rank: int, number: int, parts: Sequence[memoryview]) -> None:
        """Read a chunk into `parts`, end to end, and verify its digest.

        Raises:
            CorruptCheckpointError: names place, chunk and both digests.
        """


class InPlace(Protocol):
    """Use of chunks where they lie, without a buffer. Called by several threads."""

    def take(self, chunks: Sequence[ChunkReads]) -> bool:
        """Fill the destinations of adjacent chunks, and verify the chunks.

        Returns False, with nothing done, if the chunks must be read.

        Raises:
            CorruptCheckpointError: names place, chunk and both digests.
        """

    def wait(self) -> None:
        """Return when the destinations are filled, and the chunks are no longer in use."""


class ChunkReads(NamedTuple):
    """A chunk of one rank's shard, and the reads that need bytes of it."""

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
    """Pass the requested parts of `data`, the contents of `chunk`, to `sink`."""
    start = chunk.number * CHUNK_NBYTES
    if parts := [part_of(read, start, data) for read in chunk.reads]:
        sink.put(parts)


def part_of(read: Read, start: int, data: memoryview) -> Part:
    """Return the part of `data` that `read` takes; `data` begins at byte `start` of the shard."""
    low, high = _within(read, start, data.nbytes)
    return Part(read, start + low - read.source_offset, data[low:high])


def _within(read: Read, start: int, nbytes: int) -> tuple[int, int]:
    """Return the range that `read` takes of `nbytes` bytes that begin at `start`."""
    low = min(max(read.source_offset - start, 0), nbytes)
    high = max(min(read.source_offset + read.nbytes - start, nbytes), low)
    return low, high


def _destinations(
    chunk: ChunkReads, buffer: memoryview, sink: Sink
) -> tuple[list[memoryview], list[Part]]:
    """Return the memory to read `chunk` into, end to end, and the parts to `put` afterwards.

    Args:
        buffer: as long as the chunk; holds the bytes that are not placed, at the same positions.
    """
    start, nbytes = chunk.number * CHUNK_NBYTES, buffer.nbytes
    memory: list[memoryview] = []
    rest = []
    placed = buffered = 0
    for read in chunk.reads:
        low, high = _within(read, start, nbytes)
        if low < placed:  # two reads overlap
            return [buffer], [part_of(read, start, buffer) for read in chunk.reads]
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

    With one thread, the caller reads: no other thread must wake up or wait for the GIL.

    Args:
        gpu: the GPU to which the sink copies; None for host memory. For a GPU, buffers are
            page-locked, and all threads use its device and stream.
        in_place: takes the chunks that need no buffer, for the same sink; None: no chunks.
    """

    def __init__(
        self,
        source: ChunkSource,
        threads: int,
        gpu: Gpu | None = None,
        in_place: InPlace | None = None,
    ) -> None:
        self.source = source
        self._in_place = in_place
        self.read_nbytes = 0
        self._threads = threads
        #: Memory of all buffers.
        self.nbytes = threads * CHUNK_NBYTES
        self._pool = None
        if threads > 1:
            enter = None if gpu is None else gpu.enter_thread
            self._pool = concurrent.futures.ThreadPoolExecutor(threads, initializer=enter)
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(threads):
            # PyTorch aligns memory to 64 bytes. To an address 16 bytes past that, as numpy returns
            # for a buffer, the kernel copies a seventh more slowly.
            buffer = host_buffer(CHUNK_NBYTES, pinned=gpu is not None)
            self._buffers.put(buffer.numpy().data)
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
        """Read `chunks` and pass the requested bytes to `sink`, from several threads.

        Returns, or raises, when no chunk is being read.

        Args:
            keep: returns memory for the whole chunk, at least as long as the chunk.

        Raises:
            CorruptCheckpointError: names the place, chunk and both digests.
        """
        most = _MOST_ADJACENT if self._in_place is not None and keep is None else 1
        try:
            self._read_all(_adjacent(chunks, most), sink, keep)
        finally:
            if self._in_place is not None:
                self._in_place.wait()

    def _read_all(
        self,
        batches: Iterable[list[ChunkReads]],
        sink: Sink,
        keep: Callable[[ChunkReads], memoryview] | None,
    ) -> None:
        # Of a list, so several threads may call `next`.
        remaining = iter(list(enumerate(batches)))
        errors: dict[int, BaseException] = {}

        def end() -> None:
            """Let the threads find no more chunks."""
            for _ in remaining:
                pass

        def read() -> None:
            for number, batch in remaining:
                try:
                    self._read_batch(batch, sink, keep)
                except BaseException as error:
                    errors[number] = error
                    end()

        if self._pool is None:
            read()
        else:
            # A job per thread: a job per chunk would take 8 us, beside 20 us of other Python.
            jobs: list[concurrent.futures.Future[None]] = []
            try:
                jobs.extend(self._pool.submit(read) for _ in range(self._threads))
                concurrent.futures.wait(jobs)
            finally:
                end()
                concurrent.futures.wait(jobs)
        if errors:
            # Chunks are begun in the order of the files. So the first error of all is among these,
            # and each load of a damaged checkpoint names the same chunk.
            try:
                raise errors[min(errors)]
            finally:
                errors.clear()  # otherwise a cycle keeps the frames, and the sink, alive

    def _read_batch(
        self,
        batch: list[ChunkReads],
        sink: Sink,
        keep: Callable[[ChunkReads], memoryview] | None,
    ) -> None:
        if keep is None and self._in_place is not None and self._in_place.take(batch):
            nbytes = sum(self.chunk_nbytes(chunk.rank, chunk.number) for chunk in batch)
            with self._lock:
                self.read_nbytes += nbytes
            return
        for chunk in batch:
            self._read_chunk(chunk, sink, keep)

    def chunk_nbytes(self, rank: int, number: int) -> int:
        """Return the length of a chunk."""
        return min(CHUNK_NBYTES, self.source.data_nbytes(rank) - number * CHUNK_NBYTES)

    def _read_chunk(
        self, chunk: ChunkReads, sink: Sink, keep: Callable[[ChunkReads], memoryview] | None
    ) -> None:
        nbytes = self.chunk_nbytes(chunk.rank, chunk.number)
        buffer = self._buffers.get()
        try:
            if keep is None:
                memory, rest = _destinations(chunk, buffer[:nbytes], sink)
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


def _adjacent(chunks: Iterable[ChunkReads], most: int) -> Iterator[list[ChunkReads]]:
    """Yield `chunks` in lists of at most `most`, each of adjacent chunks of one rank."""
    batch: list[ChunkReads] = []
    for chunk in chunks:
        if batch and (
            len(batch) == most
            or (chunk.rank, chunk.number) != (batch[-1].rank, batch[-1].number + 1)
        ):
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch


def reader_threads(config: Config, most: int = _MOST_THREADS) -> int:
    """Return the number of chunks that this rank reads at the same time.

    Args:
        most: upper bound, if the configuration names no number.
    """
    # On two cores, a second thread shortens a load to 0.72 to 0.95 of the time. It costs a quarter
    # more CPU time, which is idle during a load. On one core, a second thread gains nothing.
    threads = config.read_threads or min(cpus_of_rank(), most)
    return max(1, min(threads, config.read_memory_mib * 2**20 // 2 // CHUNK_NBYTES))
