"""Reads of a plan from storage: whole verified chunks, in bounded memory."""

from __future__ import annotations

import itertools
import math
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import Read, read_plan
from megatron_flashckpt.load.chunk_reader import ChunkReader, Part, chunk_reads, deliver
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm.torch_dtypes import torch_dtype
from tests.support.checkpoints import MadeSave, expected, make, read
from tests.support.stored import read_all
from tests.support.trainer import eventually
from tests.support.worlds import (
    content,
    files_of,
    model_tensors,
    run,
    sizes,
    sources_of,
    stored_by,
    wanted_by,
    whole,
)

#: A row of two chunks and a bit, of float64.
WIDE = (2 * CHUNK_NBYTES + CHUNK_NBYTES // 10) // 8 + 1
#: The side of a square of one chunk of bytes, and of one of bfloat16.
SIDE, HALF = math.isqrt(CHUNK_NBYTES), math.isqrt(CHUNK_NBYTES // 2)
SHAPES = [
    ("wide", "exp_avg", "F64", (2, WIDE)),
    ("w4", "master", "F32", (3, CHUNK_NBYTES // 12 + 476)),
    ("w2", "weight", "BF16", (HALF - 47, HALF + 53)),
    ("w1", "weight", "U8", (SIDE + 3, SIDE + 3)),
]
#: In the first matrix, a few columns lie more than a chunk apart. Every other matrix is a little
#: larger than a chunk, so every tensor crosses a chunk border within a row.
MATRICES = [whole(*named, shape, (0, 0), shape) for *named, shape in SHAPES]
STARTS = [0, *itertools.accumulate(piece.nbytes for piece in MATRICES)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> MadeSave:
    return make(tmp_path_factory.mktemp("large") / "save", ranks=[MATRICES])


@pytest.fixture(scope="module")
def matrices() -> list[torch.Tensor]:
    """Return the matrices as integers of their element size."""
    carriers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return [
        flat.view(carriers[itemsize(piece.dtype)]).view(piece.global_shape)
        for piece, flat in zip(MATRICES, expected(MATRICES), strict=True)
    ]


def part(matrix: int, rows: tuple[int, int], columns: tuple[int, int]) -> Piece:
    """Return rows `[a, b)` and columns `[c, d)` of a matrix as a wanted piece."""
    (a, b), (c, d) = rows, columns
    of = MATRICES[matrix]
    return whole(of.key, of.kind, of.dtype, of.global_shape, (a, c), (b - a, d - c))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# ---------------------------------------------------------------------- any layout


def empty_like(pieces: list[Piece]) -> list[torch.Tensor]:
    return [torch.zeros(piece.numel, dtype=torch_dtype(piece.dtype)) for piece in pieces]


@settings(max_examples=25, deadline=None)
@given(st.data(), sizes, sizes)
def test_tensors_of_any_rank_are_filled_from_any_saved_sizes(data, saved, loaded):
    """The test gives the chunks to `deliver` without a storage."""
    tensors = model_tensors(seed=5)
    stored = stored_by(saved)
    rank = [data.draw(st.integers(0, n - 1)) for n in (loaded.tp, loaded.pp, loaded.ep, loaded.dp)]
    wanted = wanted_by(loaded, *rank)
    filled = empty_like(wanted)
    targets = Targets(wanted, filled)
    files = [bytearray(file) for file in files_of(tensors, stored)]
    for chunk in chunk_reads(read_plan(wanted, sources_of(stored), "it"), wanted):
        assert chunk.number == 0
        deliver(chunk, memoryview(files[chunk.rank]), targets)
    for piece, tensor in zip(wanted, filled, strict=True):
        assert bytes(tensor.view(torch.uint8).numpy().data) == content(tensors, piece)


# ---------------------------------------------------------------------- large tensors


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("number", range(len(MATRICES)))
def test_columns_and_ranges_of_them_are_read_bit_for_bit(
    large: MadeSave, matrices: list[torch.Tensor], number: int, threads: int
) -> None:
    """Ranges begin and end next to the first border of chunks in the tensor."""
    rows, columns = MATRICES[number].shape
    third = columns // 3
    blocks = [(0, third), (third, columns - 7), (columns - 7, columns)]
    wanted = [part(number, (0, rows), block) for block in blocks]
    expected = [matrices[number][:, low:high].reshape(-1) for low, high in blocks]
    low, high = columns // 5, columns - 1
    block = part(number, (0, rows), (low, high))
    border = (-STARTS[number] % CHUNK_NBYTES or CHUNK_NBYTES) // itemsize(block.dtype)
    row, column = divmod(border, columns)
    place = row * (high - low) + min(max(column - low, 0), high - low - 1)
    for before, after in ((0, 1), (1, 1), (9999, 9999)):
        start, end = max(place - before, 0), min(place + after, block.numel)
        wanted.append(run(block, start, end))
        expected.append(matrices[number][:, low:high].reshape(-1)[start:end])
    for filled, meant in zip(read(large.stored(), wanted, threads), expected, strict=True):
        assert torch.equal(filled, as_bytes(meant))


@pytest.mark.parametrize(
    ("number", "rows", "columns", "chunks"),
    [
        (0, (0, 2), (5, 9), {0, 2}),
        (0, (0, 2), (CHUNK_NBYTES // 8 - 1000, CHUNK_NBYTES // 8 + 1000), {0, 1, 3}),
        (0, (0, 2), (WIDE - 1, WIDE), {2, 4}),
        (0, (1, 2), (0, WIDE), {2, 3, 4}),
        (3, (0, SIDE + 3), (7, 9), {6, 7}),
    ],
)
def test_chunks_between_the_wanted_columns_are_not_read(
    large: MadeSave,
    matrices: list[torch.Tensor],
    number: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
    chunks: set[int],
) -> None:
    wanted = [part(number, rows, columns)]
    stored = large.stored()
    plan = read_plan(wanted, stored.sources(), "it")
    assert [chunk.number for chunk in chunk_reads(plan, wanted)] == sorted(chunks)
    tensors = [torch.zeros(wanted[0].nbytes, dtype=torch.uint8)]
    nbytes = read_all(stored, plan, wanted, Targets(wanted, tensors), 2)
    total = stored.shard(0).nbytes
    assert nbytes == sum(min(CHUNK_NBYTES, total - c * CHUNK_NBYTES) for c in chunks)
    assert torch.equal(tensors[0], as_bytes(matrices[number][slice(*rows), slice(*columns)]))


def test_wanted_pieces_of_one_chunk_share_its_read_and_may_overlap(
    large: MadeSave, matrices: list[torch.Tensor]
) -> None:
    stored, half, numel = large.stored(), MATRICES[0].numel // 2, MATRICES[0].numel
    numbers = [part(0, (0, 1), (n, n + 1)) for n in range(20)] * 2
    (chunk,) = chunk_reads(read_plan(numbers, stored.sources(), "it"), numbers)
    assert len(chunk.reads) == 40
    cuts = [(0, half), (half - 70_000, half + 70_000), (0, half), (half, numel)]
    wanted = [run(MATRICES[0], *cut) for cut in cuts]
    meant = matrices[0].reshape(-1)
    for filled, (low, high) in zip(read(stored, wanted), cuts, strict=True):
        assert torch.equal(filled, as_bytes(meant[low:high]))


def test_whole_tensors_are_read_into_their_target_without_a_copy(
    large: MadeSave, matrices: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor in one stretch went through a buffer")

    monkeypatch.setattr(Targets, "put", refuse)
    for filled, matrix in zip(read(large.stored(), MATRICES), matrices, strict=True):
        assert torch.equal(filled, as_bytes(matrix))


# ---------------------------------------------------------------------- memory and failures


class DiscardingSink:
    """A sink that keeps nothing."""

    def place(self, read: Read, offset: int, nbytes: int) -> None:
        return None

    def put(self, parts: list[Part]) -> None:
        assert all(part.source.nbytes for part in parts)


@pytest.mark.parametrize("threads", [1, 3])
def test_memory_is_bounded_by_one_buffer_per_thread(large: MadeSave, threads: int) -> None:
    stored = large.stored()
    plan = read_plan(MATRICES, stored.sources(), "it")
    tracemalloc.start()
    try:
        nbytes = read_all(stored, plan, MATRICES, DiscardingSink(), threads)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert nbytes == sum(piece.nbytes for piece in MATRICES) > 7 * CHUNK_NBYTES
    assert peak < threads * CHUNK_NBYTES + CHUNK_NBYTES // 4


def test_buffers_are_reused_and_never_used_by_two_chunks_at_once(large: MadeSave) -> None:
    stored = large.stored()
    chunks = chunk_reads(read_plan(MATRICES, stored.sources(), "it"), MATRICES)
    lock = threading.Lock()
    in_use: set[int] = set()
    seen: set[int] = set()

    class WatchingSink(DiscardingSink):
        def put(self, parts: list[Part]) -> None:
            (buffer,) = {id(part.source.obj) for part in parts}
            with lock:
                assert buffer not in in_use
                in_use.add(buffer)
            seen.add(buffer)
            with lock:
                in_use.remove(buffer)

    with ChunkReader(stored, 3) as reader:
        reader.read(chunks, WatchingSink())
        reader.read(chunks, WatchingSink())
        assert reader.nbytes == 3 * CHUNK_NBYTES
        assert reader.read_nbytes == 2 * sum(piece.nbytes for piece in MATRICES)
    assert 1 <= len(seen) <= 3


def test_after_an_error_nothing_more_is_written(large: MadeSave) -> None:
    """After an error, `read` starts no chunk and returns when all running chunks have ended."""
    stored = large.stored()
    chunks = chunk_reads(read_plan(MATRICES, stored.sources(), "it"), MATRICES) * 20
    running, release = threading.Barrier(3), threading.Event()
    begun: list[int] = []
    done: list[int] = []
    errors: list[BaseException] = []

    class WaitingSink(DiscardingSink):
        def put(self, parts: list[Part]) -> None:
            number = (parts[0].read.source_offset + parts[0].offset) // CHUNK_NBYTES
            begun.append(number)
            if not release.is_set() and number < 3:
                running.wait(60)
                if number == 0:
                    raise ValueError("chunk 0 is not to be had")
            release.wait(60)
            done.append(number)

    with ChunkReader(stored, 3) as reader:

        def attempt() -> None:
            try:
                reader.read(chunks, WaitingSink())
            except ValueError as error:
                errors.append(error)
                done.append(-1)  # sentinel: no entry may follow

        reading = threading.Thread(target=attempt)
        reading.start()
        reading.join(0.3)
        assert reading.is_alive(), "two chunks are still being delivered"
        release.set()
        reading.join(60)
        assert [str(error) for error in errors] == ["chunk 0 is not to be had"]
        assert done[-1] == -1
        assert len(begun) < len(chunks)
        # The reader and its buffers remain usable.
        before = reader.read_nbytes
        reader.read(chunks, DiscardingSink())
        assert reader.read_nbytes - before == 20 * sum(piece.nbytes for piece in MATRICES)
        assert done[-1] == -1


def test_of_several_damaged_chunks_the_first_in_the_file_is_named(large: MadeSave) -> None:
    """Whichever thread is faster, so two loads name one chunk."""
    stored = large.stored()
    chunks = chunk_reads(read_plan(MATRICES, stored.sources(), "it"), MATRICES)
    others = threading.Event()

    class DamagedSource:
        data_nbytes = stored.data_nbytes

        def read_chunk(self, _: int, number: int, __: Sequence[memoryview]) -> None:
            if number == 1:
                assert others.wait(60)
            elif number > 1:
                others.set()
            if number > 0:
                raise CorruptCheckpointError(f"chunk {number} is damaged")

    with (
        ChunkReader(DamagedSource(), 2) as reader,
        pytest.raises(CorruptCheckpointError, match="chunk 1 is damaged"),
    ):
        reader.read(chunks, DiscardingSink())


def test_a_thread_that_cannot_start_ends_the_others(
    large: MadeSave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has as many threads as its limit allows."""
    stored = large.stored()
    chunks = chunk_reads(read_plan(MATRICES, stored.sources(), "it"), MATRICES) * 20
    reading: list[int] = []

    class SlowSink(DiscardingSink):
        def put(self, parts: list[Part]) -> None:
            reading.append(1)
            time.sleep(0.05)
            reading.append(-1)

    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if reading:
            raise RuntimeError("can't start new thread")
        start(thread)
        eventually("a chunk that is being read", lambda: reading)

    with ChunkReader(stored, 3) as reader:
        monkeypatch.setattr(threading.Thread, "start", limited)
        with pytest.raises(RuntimeError):
            reader.read(chunks, SlowSink())
        assert sum(reading) == 0
    assert len(reading) < len(chunks)


@pytest.fixture
def damaged(large: MadeSave) -> Iterator[MadeSave]:
    """The large checkpoint with one bit of chunk 3 flipped during the test."""

    def flip() -> None:
        with open(large.shard(0), "r+b") as file:
            place = large.stored().shard(0).data_offset + 3 * CHUNK_NBYTES + 4711
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    flip()
    yield large
    flip()


@pytest.mark.parametrize("threads", [1, 4])
def test_bytes_of_a_damaged_chunk_never_arrive(
    damaged: MadeSave, matrices: list[torch.Tensor], threads: int
) -> None:
    half = WIDE // 2
    wanted = [part(0, (0, 2), (0, half)), part(0, (0, 2), (half, WIDE))]
    tensors = [torch.full((piece.numel,), -1, dtype=torch.int64) for piece in wanted]
    stored = damaged.stored()
    plan = read_plan(wanted, stored.sources(), "it")
    place = rf"chunk 3 \(bytes {3 * CHUNK_NBYTES}-{4 * CHUNK_NBYTES - 1} "
    with pytest.raises(CorruptCheckpointError, match=place):
        read_all(stored, plan, wanted, Targets(wanted, tensors), threads)
    in_damaged = torch.zeros(MATRICES[0].numel, dtype=torch.bool)
    in_damaged[3 * CHUNK_NBYTES // 8 : 4 * CHUNK_NBYTES // 8] = True
    in_damaged = in_damaged.view(MATRICES[0].shape)
    for tensor, columns in zip(tensors, (slice(0, half), slice(half, None)), strict=True):
        assert (tensor[in_damaged[:, columns].reshape(-1)] == -1).all()
        meant = matrices[0][:, columns].reshape(-1)
        # All bytes that arrived are right.
        arrived = tensor != -1
        assert torch.equal(tensor[arrived], meant[arrived])
