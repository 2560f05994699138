"""Loads from memory and from storage: rate, and GPU memory beyond the tensors.

One rank loads without a process group, so reads go directly to the tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import torch

from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.load.memory_checkpoints import held_in_memory
from megatron_flashckpt.load.memory_source import MemorySource, open_memory
from megatron_flashckpt.load.plan import LoadPlan
from megatron_flashckpt.load.slot_chunks import OfferedSlot
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.memory.pinned_slab import CHUNK_NBYTES
from megatron_flashckpt.storage.opening import open_store
from tests.support.stored import read_all
from tools.gpu_check import machine
from tools.gpu_check.rank import Node, Rank, node
from tools.gpu_check.report import Report

_TENSORS = 64
#: Threads that read, the default of `read_threads` for one rank of a large node.
_THREADS = 4
#: Largest GPU memory that a load may use in addition to the tensors that it fills.
_MOST_NBYTES = 256 << 20


def run(report: Report) -> None:
    """Save 4 GiB once; load it from the slot and from the files."""
    numel = machine.pick((4 << 30) // _TENSORS // 4, 40_000)
    with node() as where:
        tensors = [
            torch.arange(numel, dtype=torch.float32, device="cuda").add_(float(number))
            for number in range(_TENSORS)
        ]
        rank = where.rank(tensors)
        rank.save(1)
        errors = rank.wait()
        gib = sum(tensor.nbytes for tensor in tensors) / 2**30
        report.must(f"a save of {gib:.2g} GiB becomes durable", errors == [], "; ".join(errors))
        expected = [tensor.clone() for tensor in tensors]
        again, held = _restarted(where, rank)
        loaders = {"memory": _from_memory(rank, held), "storage": _from_storage(rank, where)}
        rates = {name: _load(report, name, load, rank, expected) for name, load in loaders.items()}
        again.checkpointer.link.stager.wait_pinned()
        copied = _copied_rate(report, held.slot)
        what = "load from memory, relative to one page-locked copy"
        detail = f"{rates['memory']:.1f} GB/s"
        report.figure(what, rates["memory"] / copied, "x", detail, headline=True)


def _restarted(where: Node, rank: Rank) -> tuple[Rank, MemorySource]:
    """Return the rank after another start, and its memory, as the agent hands it over."""
    # An ending process unlocks its memory. This process continues and may map at the same address,
    # so it must unlock the slab itself.
    rank.checkpointer.link.stager.drop_slab()
    rank.close()
    again = where.rank(rank.tensors)
    (checkpoint,) = held_in_memory(again.checkpointer).checkpoints
    with mock.patch.object(parallel, "model_sizes", return_value=(1, 1, 1)):
        return again, open_memory(checkpoint, again.checkpointer.config)


def _from_memory(rank: Rank, source: MemorySource) -> Callable[[], int]:
    """Return a function that fills the tensors of `rank` and returns the number of bytes read."""
    reads = read_plan(rank.pieces, source.job.sources, "memory")
    plan = LoadPlan(reads, rank.pieces, Targets(rank.pieces, rank.tensors), set())

    def load() -> int:
        with source.open(plan) as reader:
            source.fill(plan, reader)
            return reader.read_nbytes

    return load


def _from_storage(rank: Rank, where: Node) -> Callable[[], int]:
    source = open_checkpoint(open_store(where.root), 1)
    plan = read_plan(rank.pieces, source.sources(), "storage")
    targets = Targets(rank.pieces, rank.tensors)
    return lambda: read_all(source, plan, rank.pieces, targets, _THREADS, targets.gpu)


def _load(
    report: Report, name: str, load: Callable[[], int], rank: Rank, expected: list[torch.Tensor]
) -> float:
    """Load and compare all bytes; return the rate in GB/s."""
    for tensor in rank.tensors:
        tensor.fill_(-1.0)
    torch.cuda.synchronize()
    has_gpu = machine.simulated_node is None
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    nbytes = load()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    rate = nbytes / seconds / 1e9
    report.figure(f"load from {name}", rate, "GB/s", f"{seconds:.2f} s")
    pairs = enumerate(zip(rank.tensors, expected, strict=True))
    unequal = [number for number, pair in pairs if not _same(*pair)]
    report.must(f"load from {name}: bytes are equal", not unequal, f"unequal: {unequal[:5]}")
    if has_gpu:
        more = torch.cuda.max_memory_allocated() - before
        report.must(
            f"load from {name} takes less than 256 MiB of GPU memory in addition to the tensors",
            more < _MOST_NBYTES,
            f"{more / 2**20:.1f} MiB",
        )
    return rate


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if machine.simulated_node is not None:
        return torch.equal(one.cpu(), other.cpu())
    return torch.equal(one, other)


def _copied_rate(report: Report, held: OfferedSlot) -> float:
    """Copy the same bytes without digests and plans; return the rate in GB/s."""
    target = torch.empty(held.data.numel(), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    _straight(held, target)
    torch.cuda.synchronize()
    rate = target.numel() / (time.perf_counter() - started) / 1e9
    report.figure("slot to GPU, straight from its page-locked mapping", rate, "GB/s")
    return rate


def _straight(held: OfferedSlot, target: torch.Tensor) -> None:
    """Copy from the mapping of the slot, in the same parts as page-locking."""
    begin = 0
    first = CHUNK_NBYTES - held._offset % CHUNK_NBYTES
    for border in (*range(first, target.numel(), CHUNK_NBYTES), target.numel()):
        end = min(border, target.numel())
        target[begin:end].copy_(held.data[begin:end], non_blocking=True)
        begin = end
