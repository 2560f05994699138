"""Loads use a rank's GPU as its training thread does; CUDA's calls are recorded, none is made."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flashckpt.layout.coverage import Read, ReadPlan
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.shard_file import CHUNK_NBYTES
from megatron_flashckpt.restore import gpu
from megatron_flashckpt.restore.gpu import Gpu
from megatron_flashckpt.restore.reader import ChunkReader, Part, chunk_reads
from megatron_flashckpt.restore.targets import Targets


class RecordedGpu:
    """A GPU that makes the copies asked of it when somebody waits for them, and not before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._asked: list[Callable[[], object]] = []
        self._entered = threading.local()
        self.made: list[int] = []
        """Lengths of the host memory that was made for it."""
        self.entered: set[int] = set()
        real_foreach, real_copy = torch._foreach_copy_, torch.Tensor.copy_

        def foreach(targets: Any, sources: Any, non_blocking: bool = False) -> None:
            assert non_blocking
            self._asked.append(lambda: real_foreach(targets, sources))

        def copy(target: Any, source: Any, non_blocking: bool = False) -> None:
            assert non_blocking
            self._asked.append(lambda: real_copy(target, source))

        monkeypatch.setattr(torch, "_foreach_copy_", foreach)
        monkeypatch.setattr(torch.Tensor, "copy_", copy)

    def enter_thread(self) -> None:
        self._entered.yes = True
        self.entered.add(threading.get_ident())

    def is_entered(self) -> bool:
        return hasattr(self._entered, "yes")

    def host_memory(self, nbytes: int) -> memoryview:
        self.made.append(nbytes)
        return memoryview(bytearray(nbytes))

    def synchronize(self) -> None:
        while self._asked:
            self._asked.pop(0)()


def test_a_buffer_that_cannot_be_page_locked_is_an_ordinary_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_empty = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real_empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    with caplog.at_level(logging.WARNING):
        buffer = gpu.host_buffer(24, pinned=True)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((24,), torch.uint8, "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "a buffer of 24 bytes could not be page-locked (CUDA error: out of memory), so this load "
        "copies to the GPU more slowly; look for a limit on locked memory of this process or "
        "container"
    ]


@pytest.mark.parametrize("pinned", [True, False])
def test_only_a_rank_with_a_gpu_asks_for_page_locked_memory(
    monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    asked: list[bool] = []
    real_empty = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return real_empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    gpu.host_buffer(8, pinned=pinned)
    assert asked == [pinned]


def test_a_rank_whose_targets_lie_in_host_memory_uses_no_gpu() -> None:
    assert Gpu.of([torch.zeros(2), torch.zeros(3)]) is None
    assert Targets([], []).gpu is None


def test_a_thread_makes_device_and_stream_of_the_training_thread_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, Any]] = []
    device = torch.device("cuda", 5)
    stream: Any = SimpleNamespace(device=device)

    def current_stream(asked: torch.device) -> Any:
        calls.append(("current_stream", asked))
        return stream

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda it: calls.append(("set_device", it)))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda it: calls.append(("set_stream", it)))
    target: Any = SimpleNamespace(is_cuda=True, device=device)
    noted = Gpu.of([torch.zeros(2), target])
    assert noted is not None
    noted.enter_thread()
    # The device first: to set a stream of another device would make a context on device 0.
    assert calls == [("current_stream", device), ("set_device", device), ("set_stream", stream)]


#: One stored as it is wanted, one cut otherwise.
PIECES = [
    Piece("a", "master", "F32", (6,), (0,), (6,), 0, 6),
    Piece("b", "weight", "BF16", (4, 2), (0, 1), (4, 1), 0, 4),
]
WHOLE = Piece("b", "weight", "BF16", (4, 2), (0, 0), (4, 2), 0, 8)


def test_a_source_may_be_overwritten_when_its_parts_were_put(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [torch.zeros(6), torch.zeros(4, dtype=torch.bfloat16)]
    masters, weights = torch.arange(6.0), torch.arange(8.0).to(torch.bfloat16)
    sources = [bytearray(it.view(torch.uint8).numpy()) for it in (masters, weights)]
    targets = Targets(PIECES, tensors)
    device: Any = RecordedGpu(monkeypatch)
    targets.gpu = device
    targets.put(
        [
            Part(Read.whole(0, PIECES[0], 0), 0, memoryview(sources[0])),
            Part(Read.whole(1, WHOLE, 24), 0, memoryview(sources[1])),
        ]
    )
    for source in sources:
        source[:] = b"\xff" * len(source)
    assert torch.equal(tensors[0], masters)
    assert torch.equal(tensors[1], weights.view(4, 2)[:, 1])


class Zeros:
    """A shard of zeros."""

    def data_nbytes(self, rank: int) -> int:
        return 6 * CHUNK_NBYTES

    def read_chunk(self, rank: int, number: int, parts: list[memoryview]) -> None:
        pass


@pytest.mark.parametrize("threads", [1, 3])
def test_every_thread_of_a_load_enters_the_gpu_before_it_copies(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    numel = 6 * CHUNK_NBYTES
    piece = Piece("a", "weight", "U8", (numel,), (0,), (numel,), 0, numel)
    chunks = chunk_reads(ReadPlan({0: [Read.whole(0, piece, 0)]}, ()), [piece])
    device: Any = RecordedGpu(monkeypatch)
    entered: list[bool] = []

    class Sink:
        def place(self, read: Read, offset: int, nbytes: int) -> None:
            return None

        def put(self, parts: list[Part]) -> None:
            entered.append(device.is_entered())

    with ChunkReader(Zeros(), threads, device) as reader:
        reader.read(chunks, Sink())
    # The calling thread alone is the training thread, whose device and stream they are.
    assert entered == [threads > 1] * 6
    assert threading.get_ident() not in device.entered
    assert device.made == [CHUNK_NBYTES] * threads
