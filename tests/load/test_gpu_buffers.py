"""Copies of a load to the rank's GPU: on the training thread's stream, from page-locked memory.

The GPUs are `tests.simulated_gpu`, which follows CUDA's rules for order, threads and memory.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import Read, read_plan
from megatron_flashckpt.load import gpu_buffers
from megatron_flashckpt.load.chunk_reader import ChunkReader, Part, chunk_reads
from megatron_flashckpt.load.gpu_buffers import Gpu
from megatron_flashckpt.load.replica_sharing import ReplicaGroup, read_with_replicas
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm.torch_dtypes import torch_dtype
from tests.simulated_gpu import Node, simulated_gpus
from tests.support.checkpoints import MadeSave, content, make
from tests.support.stored import read_all
from tests.support.trainer import PATIENCE_S, eventually
from tests.support.worlds import whole

RANK = 5
TRAINING = "training"
NUMEL = CHUNK_NBYTES // 2 + 7
STORED = [
    whole("a", "master", "F32", (NUMEL,), (0,), (NUMEL,)),
    whole("b", "master", "F32", (999,), (0,), (999,)),
    whole("c", "master", "F32", (1001,), (0,), (1001,)),
    whole("d", "weight", "BF16", (1001, 2003), (0, 0), (1001, 2003)),
    whole("e", "buffer", "U8", (NUMEL,), (0,), (NUMEL,)),
]
#: The target of this piece has 16-bit elements, to which the stored masters are rounded.
ROUNDED = 2
#: The load wants some columns of this piece, so it is copied run by run.
CUT = 3
WANTED = list(STORED)
WANTED[CUT] = whole("d", "weight", "BF16", (1001, 2003), (0, 11), (1001, 1500))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeSave:
    return make(tmp_path_factory.mktemp("gpu") / "save", ranks=[STORED])


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    flat = [values(piece) for piece in STORED]
    flat[CUT] = flat[CUT].view(1001, 2003)[:, 11:1511].reshape(-1)
    flat[ROUNDED] = flat[ROUNDED].to(torch.bfloat16)
    return flat


@pytest.fixture
def node() -> Iterator[Node]:
    with simulated_gpus(8) as node:
        yield node


@pytest.fixture
def training(node: Node) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """The training thread of local rank 5, whose current stream is not the default one."""

    def enter() -> None:
        torch.cuda.set_device(RANK)
        torch.cuda.set_stream(torch.cuda.Stream())

    with concurrent.futures.ThreadPoolExecutor(1, TRAINING, initializer=enter) as pool:
        pool.submit(node.calls.clear).result(PATIENCE_S)
        yield pool
        node.close()  # so no thread waits for the queued work of a failed test


@pytest.fixture(autouse=True)
def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the flag of the warning that a process logs only once."""
    monkeypatch.setattr(gpu_buffers, "_reported", set())


def values(piece: Piece) -> torch.Tensor:
    return torch.frombuffer(bytearray(content(piece)), dtype=torch_dtype(piece.dtype))


def empty_targets(device: str = "cuda") -> list[torch.Tensor]:
    dtypes = [torch_dtype(piece.dtype) for piece in WANTED]
    dtypes[ROUNDED] = torch.bfloat16
    return [
        torch.empty(piece.numel, dtype=dtype, device=device)
        for piece, dtype in zip(WANTED, dtypes, strict=True)
    ]


class ConcurrentReadsSource:
    """A checkpoint whose first chunks are read by `threads` threads at the same time."""

    def __init__(self, made: MadeSave, threads: int) -> None:
        self._stored = made.stored()
        self._barrier = threading.Barrier(threads, timeout=PATIENCE_S)
        self._met = threading.local()

    def sources(self) -> Any:
        return self._stored.sources()

    def data_nbytes(self, rank: int) -> int:
        return self._stored.data_nbytes(rank)

    def read_chunk(self, rank: int, number: int, parts: Sequence[memoryview]) -> None:
        if not hasattr(self._met, "yes"):
            self._met.yes = True
            self._barrier.wait()
        self._stored.read_chunk(rank, number, parts)


def load(made: MadeSave, tensors: list[torch.Tensor], threads: int) -> None:
    """Fill `tensors`, the targets of `WANTED`. Called by the training thread."""
    source = ConcurrentReadsSource(made, threads)
    plan = read_plan(WANTED, source.sources(), "the checkpoint")
    targets = Targets(WANTED, tensors)
    read_all(source, plan, WANTED, targets, threads, targets.gpu)


def names(node: Node) -> list[str]:
    return [call.name for call in node.calls]


def are_equal(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    on_host = [tensor.cpu() for tensor in tensors]
    # Random bits hold NaNs, so the bytes are compared.
    pairs = zip(on_host, expected, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def let_load_begin(node: Node, loading: Future[Any]) -> None:
    """Return when a copy is enqueued and only the training thread's stream has work left."""

    def is_waiting() -> bool:
        busy = [stream for stream in node.devices[RANK].streams if stream._pending]
        return len(busy) <= 1 and "copy to device" in names(node)

    eventually("a copy was asked for", lambda: loading.done() or is_waiting())


# ---------------------------------------------------------------------- threads and order


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_of_a_load_use_the_rank_s_gpu_after_the_training_thread_s_earlier_work(
    node: Node,
    training: concurrent.futures.ThreadPoolExecutor,
    made: MadeSave,
    expected: list[torch.Tensor],
    threads: int,
) -> None:
    go = threading.Event()

    def work() -> bool:
        tensors = empty_targets()
        stream: Any = torch.cuda.current_stream()
        stream.enqueue(go.wait)
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(0xFF)
        load(made, tensors, threads)
        torch.cuda.synchronize()
        return are_equal(tensors, expected)

    loading = training.submit(work)
    let_load_begin(node, loading)
    assert not loading.done()
    go.set()
    assert loading.result(PATIENCE_S)
    entered = [call for call in node.calls if call.name == "set_device"]
    assert {call.device for call in node.calls if call not in entered} == {RANK}
    copying = {call.thread for call in node.calls if call.name == "copy to device"}
    assert len(copying) == threads
    assert {call.thread for call in entered} == (copying if threads > 1 else set())
    # The calling thread keeps its device, stream and capture mode.
    assert (f"{TRAINING}_0" in copying) == (threads == 1)


@pytest.mark.parametrize("threads", [1, 3])
def test_after_a_load_any_stream_sees_the_loaded_tensors(
    node: Node, training: concurrent.futures.ThreadPoolExecutor, made: MadeSave, threads: int
) -> None:
    """Padding is zeroed on the training thread's stream before the chunks are read."""
    go = threading.Event()

    def work() -> torch.Tensor:
        padding = torch.ones(100, device="cuda")
        stream: Any = torch.cuda.current_stream()
        stream.enqueue(go.wait)
        targets = Targets([STORED[1]], [padding])
        targets.zero(0)
        with ChunkReader(made.stored(), threads, targets.gpu) as reader:
            read_with_replicas(reader, [], targets, ReplicaGroup(None, "never", 0))
        with torch.cuda.stream(torch.cuda.Stream()):
            return padding.cpu()

    loading = training.submit(work)
    eventually("the load waits", lambda: loading.done() or "synchronize" in names(node))
    assert not loading.done()
    go.set()
    assert torch.equal(loading.result(PATIENCE_S), torch.zeros(100))


def test_a_load_s_time_includes_its_work_on_the_gpu(made: MadeSave) -> None:
    """Training offloads during the load: its copy keeps the engine busy for half a second."""
    seconds = 0.5
    piece = STORED[1]
    with simulated_gpus(8, d2h_bytes_per_s=4096 / seconds) as node:
        torch.cuda.set_device(RANK)
        tensor, offloaded = torch.empty(999, device="cuda"), torch.zeros(1024, device="cuda")
        host = torch.empty(1024, pin_memory=True)

        class OffloadingSource(ConcurrentReadsSource):
            def read_chunk(self, rank: int, number: int, parts: Sequence[memoryview]) -> None:
                with torch.cuda.stream(torch.cuda.Stream()):
                    host.copy_(offloaded, non_blocking=True)
                super().read_chunk(rank, number, parts)

        source = OffloadingSource(made, 1)
        targets = Targets([piece], [tensor])
        chunks = chunk_reads(read_plan([piece], source.sources(), "it"), [piece])
        with ChunkReader(source, 1, targets.gpu) as reader:
            report = read_with_replicas(reader, chunks, targets, ReplicaGroup(None, "never", 0))
        assert len(chunks) == 1
        assert report.seconds >= seconds
        assert all(stream.query() for stream in node.devices[RANK].streams)


# ---------------------------------------------------------------------- memory


#: One call copies all floats of a chunk; elements of other types take one call per run.
PIECES = [
    whole("a", "master", "F32", (6,), (0,), (6,)),
    whole("b", "buffer", "U8", (8,), (0,), (8,)),
]


def test_a_buffer_may_be_overwritten_after_its_parts_were_put(
    node: Node, training: concurrent.futures.ThreadPoolExecutor
) -> None:
    contents = [torch.arange(6.0), torch.arange(8, dtype=torch.uint8)]

    def work() -> list[torch.Tensor]:
        tensors = [torch.zeros(len(flat), dtype=flat.dtype, device="cuda") for flat in contents]
        targets = Targets(PIECES, tensors)
        assert targets.gpu is not None
        parts = []
        for number, flat in enumerate(contents):
            source = gpu_buffers.host_buffer(flat.nbytes, pinned=True).numpy().data
            source[:] = flat.view(torch.uint8).numpy().data
            parts.append(Part(Read.whole(number, PIECES[number], 0), 0, source))
        targets.put(parts)
        for part in parts:
            part.source[:] = b"\xff" * part.source.nbytes
        return tensors

    with node.devices[RANK].held():
        putting = training.submit(work)
        eventually(
            "the copies are awaited", lambda: putting.done() or "Stream.synchronize" in names(node)
        )
        assert not putting.done()
    tensors = putting.result(PATIENCE_S)
    torch.cuda.synchronize(RANK)
    assert are_equal(tensors, contents)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_thread_with_page_locked_buffers_waits_once_per_chunk(
    node: Node, training: concurrent.futures.ThreadPoolExecutor, made: MadeSave, threads: int
) -> None:
    """CUDA blocks the thread in every copy from memory that is not page-locked."""
    equal_pieces = STORED[:2]

    def work() -> tuple[int, list[torch.Tensor]]:
        tensors = [torch.empty(piece.numel, device="cuda") for piece in equal_pieces]
        targets = Targets(equal_pieces, tensors)
        source = ConcurrentReadsSource(made, threads)
        chunks = chunk_reads(read_plan(equal_pieces, source.sources(), "it"), equal_pieces)
        node.calls.clear()
        with ChunkReader(source, threads, targets.gpu) as reader:
            reader.read(chunks, targets)
        return len(chunks), tensors

    count, tensors = training.submit(work).result(PATIENCE_S)
    assert [made.nbytes for made in node.runtime.kept] == [CHUNK_NBYTES] * threads
    assert names(node).count("Stream.synchronize") == count
    assert are_equal(tensors, [values(piece) for piece in equal_pieces])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_load_without_page_locked_buffers_warns_once_and_is_bit_exact(
    node: Node,
    training: concurrent.futures.ThreadPoolExecutor,
    made: MadeSave,
    expected: list[torch.Tensor],
    threads: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    node.runtime.most_nbytes = CHUNK_NBYTES - 1

    def work() -> tuple[bool, torch.Tensor]:
        tensors = empty_targets()
        load(made, tensors, threads)
        # Here a kernel of the training thread would raise the error of an earlier call.
        return are_equal(tensors, expected), torch.zeros(1, device="cuda").add_(1).cpu()

    with caplog.at_level(logging.WARNING):
        is_right, later = training.submit(work).result(PATIENCE_S)
    assert is_right
    assert torch.equal(later, torch.ones(1))
    assert "cudaHostAlloc" in names(node)
    assert node.runtime.kept == []
    assert [record.getMessage() for record in caplog.records] == [
        "a buffer of 4194304 bytes could not be page-locked (CUDA error: out of memory), so this "
        "load copies to the GPU more slowly; usually the kernel or the GPU driver limits "
        "page-locked memory: update them"
    ]


def test_a_load_to_host_memory_makes_no_cuda_call(
    node: Node, made: MadeSave, expected: list[torch.Tensor]
) -> None:
    tensors = empty_targets("cpu")
    assert Gpu.of(tensors) is None
    load(made, tensors, 3)
    assert node.calls == []
    assert are_equal(tensors, expected)


@pytest.mark.parametrize("pinned", [True, False])
def test_only_buffers_for_a_gpu_are_page_locked(node: Node, pinned: bool) -> None:
    buffer = gpu_buffers.host_buffer(24, pinned=pinned)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((24,), torch.uint8, "cpu")
    assert node.runtime.is_locked(buffer) is pinned
    assert buffer.data_ptr() % 64 == 0, "the kernel copies faster to the start of a cache line"
