"""Loads to a GPU from a slot that is page-locked, while the load runs, or not at all.

The GPU is `tests.simulated_gpu`, which refuses a copy across two registrations and runs
asynchronous copies later.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES, chunk_digest
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.layout.template import PlanCache, Source
from megatron_flashckpt.load import chunk_reader
from megatron_flashckpt.load.chunk_reader import chunk_reads
from megatron_flashckpt.load.memory_source import MemorySource
from megatron_flashckpt.load.plan import LoadPlan
from megatron_flashckpt.load.slot_chunks import OfferedSlot
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm.torch_dtypes import torch_dtype
from megatron_flashckpt.memory import pinned_slab
from megatron_flashckpt.memory.pinned_slab import PinnedSlab
from megatron_flashckpt.memory.slab import Slab
from tests.load.test_gpu_buffers import are_equal, values
from tests.simulated_gpu import Node, simulated_gpus
from tests.support.checkpoints import SAVE_ID, content
from tests.support.strategies import in_layout_order
from tests.support.trainer import PATIENCE_S, eventually, write_slot
from tests.support.worlds import whole

RANK = 5
#: One registration holds a little more than two chunks, so borders lie within chunks.
LOCKED_NBYTES = 2 * CHUNK_NBYTES + CHUNK_NBYTES // 2
LONG = CHUNK_NBYTES // 4 * 3 + 16
PIECES = [
    whole("a", "master", "F32", (LONG,), (0,), (LONG,)),
    whole("b", "weight", "BF16", (1001, 2003), (0, 0), (1001, 2003)),
    whole("c", "master", "F32", (1001,), (0,), (1001,)),
    whole("d", "buffer", "U8", (CHUNK_NBYTES + 5,), (0,), (CHUNK_NBYTES + 5,)),
]
#: The load wants some columns of this piece, so it is copied run by run.
CUT = 1
WANTED = list(PIECES)
WANTED[CUT] = whole("b", "weight", "BF16", (1001, 2003), (0, 11), (1001, 1500))


class Held:
    """A slot with `PIECES`, of a slab that the tests page-lock."""

    def __init__(self) -> None:
        pieces = in_layout_order(PIECES)
        layout = PlanCache().layout(pieces)
        self.slab = Slab.create(1, 16384, layout.nbytes, "0")
        with write_slot(self.slab.slots[0], layout, 1, SAVE_ID).data() as data:
            data[:] = b"".join(map(content, pieces))
            chunks = range(0, layout.nbytes, CHUNK_NBYTES)
            digests = tuple(chunk_digest(data[n : n + CHUNK_NBYTES]) for n in chunks)
        self.chunks = len(digests)
        self.locked: PinnedSlab | None = None
        self.slot = WatchedSlot(self.slab, Offer(0, 1, SAVE_ID, True, digests), 0, self._is_pinned)
        self.source = Source(0, layout.template, layout.placement)

    def _is_pinned(self, end: int) -> bool:
        return self.locked is not None and self.locked.covers(end)

    def lock(self) -> None:
        self.locked = PinnedSlab(self.slab, RANK, None)
        self.locked.wait(PATIENCE_S)

    def flip(self, offset: int) -> None:
        with self.slab.slots[0].data() as data:
            data[offset] ^= 1

    def close(self) -> None:
        if self.locked is not None:
            self.locked.unpin()
        self.slab.close()


class WatchedSlot(OfferedSlot):
    """Notes the chunks that were read into buffers, and those that were verified in place."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.read: list[int] = []
        self.verified: list[int] = []
        self.after_read: Callable[[], None] = lambda: None

    def read_chunk(self, rank: int, number: int, parts: Sequence[memoryview]) -> None:
        super().read_chunk(rank, number, parts)
        self.read.append(number)
        self.after_read()

    def verify(self, rank: int, number: int) -> None:
        super().verify(rank, number)
        self.verified.append(number)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(pinned_slab, "CHUNK_NBYTES", LOCKED_NBYTES)
    monkeypatch.setattr(chunk_reader, "_MOST_ADJACENT", 2)
    with simulated_gpus(8) as node:
        torch.cuda.set_device(RANK)
        yield node


@pytest.fixture
def held(node: Node) -> Iterator[Held]:
    made = Held()
    yield made
    node.closed.clear()
    made.close()


def load(held: Held, threads: int, wanted: list[Piece] = WANTED) -> list[torch.Tensor]:
    """Fill new tensors on the GPU from the slot, as a load from memory does."""
    torch.cuda.set_device(RANK)
    tensors = [
        torch.zeros(piece.numel, dtype=torch_dtype(piece.dtype), device="cuda") for piece in wanted
    ]
    targets = Targets(wanted, tensors)
    plan = LoadPlan(read_plan(wanted, [held.source], "the slot"), wanted, targets, set())
    unused: Any = None
    source = MemorySource(held.slot, unused, frozenset(), threads, unused, unused, b"", 1, True)
    with source.open(plan) as reader:
        reader.read(chunk_reads(plan.reads, wanted), targets)
        assert reader.read_nbytes == held.source.template.nbytes
    return tensors


def are_right(tensors: list[torch.Tensor], wanted: list[Piece] = WANTED) -> bool:
    expected = [values(piece) for piece in PIECES]
    if wanted is WANTED:
        expected[CUT] = expected[CUT].view(1001, 2003)[:, 11:1511].reshape(-1)
    return are_equal(tensors, expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_locked_slot_is_copied_without_a_buffer_and_with_one_wait_for_whole_tensors(
    node: Node, held: Held, threads: int
) -> None:
    """A wait of each chunk would keep the GPU idle while the chunk is digested."""
    held.lock()
    assert are_right(load(held, threads))
    node.calls.clear()
    tensors = load(held, threads, PIECES)
    assert [call.name for call in node.calls].count("Stream.synchronize") == 1
    assert are_right(tensors, PIECES)
    assert held.slot.read == []
    assert sorted(held.slot.verified) == sorted([*range(held.chunks)] * 2)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_slot_that_cannot_be_locked_is_copied_through_buffers(
    node: Node, held: Held, threads: int
) -> None:
    node.runtime.failing_call = 0
    held.lock()
    assert are_right(load(held, threads))
    assert sorted(held.slot.read) == list(range(held.chunks))
    assert held.slot.verified == []


def test_a_load_does_not_wait_for_locking_and_uses_memory_as_it_is_locked(
    node: Node, held: Held
) -> None:
    def lock_once() -> None:
        held.slot.after_read = lambda: None
        held.lock()

    held.slot.after_read = lock_once
    assert are_right(load(held, 1))
    assert held.slot.read == [0, 1]
    assert held.slot.verified == list(range(2, held.chunks))


@pytest.mark.parametrize("is_locked", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_changed_byte_fails_the_load_when_the_gpu_has_stopped_reading(
    node: Node, held: Held, threads: int, is_locked: bool
) -> None:
    if is_locked:
        held.lock()
    held.flip(3 * CHUNK_NBYTES + 4711)
    with pytest.raises(CorruptCheckpointError, match=r"chunk 3: digest .*, expected "):
        load(held, threads)
    assert all(stream.query() for stream in node.devices[RANK].streams)


def test_digests_do_not_wait_for_the_gpu_and_the_load_does(node: Node, held: Held) -> None:
    held.lock()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
        with node.devices[RANK].held():
            loading = pool.submit(load, held, 1, PIECES)
            eventually(
                "all chunks are verified",
                lambda: loading.done() or len(held.slot.verified) == held.chunks,
            )
            threading.Event().wait(0.05)
            assert not loading.done()
        assert are_right(loading.result(PATIENCE_S), PIECES)
