"""Loads from memory and from storage: rate, CUDA calls, and GPU memory beyond the tensors.

One rank loads without a process group, so reads go directly to the tensors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.layout.read_plan import read_plan
from megatron_flashckpt.layout.template import Source
from megatron_flashckpt.load.chunk_reader import read_all
from megatron_flashckpt.load.slot_source import OfferedSlot
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.memory.pinning import CHUNK_NBYTES
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save.stager import Stager
from megatron_flashckpt.storage.posix import PosixStorage
from tools.gpu_check import machine
from tools.gpu_check.rank import Node, Rank, node
from tools.gpu_check.report import Report

LETTER = "L"
TITLE = "loads from memory and from storage"
SECONDS = 75
GPUS = 1
SIMULATED = True
MEGATRON = True
ALONE = True

_TENSORS = 64
#: Threads that read, the default of `read_threads` for one rank of a large node.
_THREADS = 4
#: Largest GPU memory that a load may use in addition to the tensors that it fills.
_MOST_NBYTES = 256 << 20
_BOUNCE_NBYTES = 4 << 20
#: Counted CUDA calls, by their names in the profiler.
_CALLS = ("cudaMemcpyAsync", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaLaunchKernel")


def run(report: Report) -> None:
    """Save 8 GiB once; load it from the slot and from the files."""
    numel = machine.pick((8 << 30) // _TENSORS // 4, 40_000)
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
        held, slab = _held(where, rank)
        for name, source in (("memory", held), ("storage", _stored(where))):
            load = _loader(rank, name, source)
            _load(report, name, load, rank, expected)
        _report_rates(report, held, slab)


def _held(where: Node, rank: Rank) -> tuple[OfferedSlot, Slab]:
    """Return the slot as a restarted rank gets it from the agent."""
    # An ending process unlocks its memory. This process continues and may map at the same address,
    # so it must unlock the slab itself.
    rank.checkpointer.link.stager.drop_slab()
    rank.close()
    again = where.rank(rank.tensors)
    slab, offers = again.checkpointer.link.take_slab()
    assert slab is not None, "the agent holds no slab"
    return OfferedSlot(slab, offers[0], 0), slab


def _stored(where: Node) -> StoredCheckpoint:
    storage = PosixStorage(where.root)
    return StoredCheckpoint(storage, 1, read_manifest(storage, 1))


def _loader(rank: Rank, name: str, source: OfferedSlot | StoredCheckpoint) -> Callable[[], int]:
    """Return a function that fills the tensors of `rank` and returns the number of bytes read."""
    if isinstance(source, OfferedSlot):
        sources = [Source(0, source.meta.template, source.meta.placement)]
    else:
        sources = source.sources()
    plan = read_plan(rank.pieces, sources, name)
    targets = Targets(rank.pieces, rank.tensors)
    return lambda: read_all(source, plan, rank.pieces, targets, _THREADS)


def _load(
    report: Report, name: str, load: Callable[[], int], rank: Rank, expected: list[torch.Tensor]
) -> None:
    """Load twice: once for time and memory, once under the profiler."""
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
    report.figure(f"load from {name}", nbytes / seconds / 1e9, "GB/s", f"{seconds:.2f} s")
    pairs = enumerate(zip(rank.tensors, expected, strict=True))
    unequal = [number for number, pair in pairs if not _same(*pair)]
    report.must(f"load from {name}: bytes are equal", not unequal, f"unequal: {unequal[:5]}")
    if not has_gpu:
        return
    more = torch.cuda.max_memory_allocated() - before
    report.must(
        f"load from {name} takes less than 256 MiB of GPU memory in addition to the tensors",
        more < _MOST_NBYTES,
        f"{more / 2**20:.1f} MiB",
    )
    for call, count in _profiled(load).items():
        report.figure(f"load from {name}: {call} per GiB", count / nbytes * 2**30, "calls")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if machine.simulated_node is not None:
        return torch.equal(one.cpu(), other.cpu())
    return torch.equal(one, other)


def _profiled(load: Callable[[], int]) -> dict[str, int]:
    """Return the number of each CUDA call in a load."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        load()
        torch.cuda.synchronize()
    counts = {event.key: int(event.count) for event in profile.key_averages()}
    return {call: counts.get(call, 0) for call in _CALLS}


def _report_rates(report: Report, held: OfferedSlot, slab: Slab) -> None:
    """Copy the same bytes in several ways without digests and plans, for comparison."""
    target = torch.empty(held.data.numel(), dtype=torch.uint8, device="cuda")

    def rate(what: str, move: Callable[[], None]) -> None:
        target.fill_(0)
        torch.cuda.synchronize()
        started = time.perf_counter()
        move()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        report.figure(f"slot to GPU, {what}", target.numel() / seconds / 1e9, "GB/s")

    rate("read into 4 MiB buffers", lambda: _bounce(held, target, pinned=False))
    rate("read into page-locked 4 MiB buffers", lambda: _bounce(held, target, pinned=True))
    rate("straight from its mapping", lambda: _straight(held, target))
    stager = Stager()
    stager.use(slab, device=torch.cuda.current_device())
    started = time.perf_counter()
    stager.pin(None)
    stager.wait_pinned()
    report.figure("page-locking of both slots", time.perf_counter() - started, "s")
    rate("straight from its page-locked mapping", lambda: _straight(held, target))
    stager.close()


def _bounce(held: OfferedSlot, target: torch.Tensor, *, pinned: bool) -> None:
    """Read the slot as a file with one thread, into four buffers in turn."""
    buffers = [torch.empty(_BOUNCE_NBYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(4)]
    events = [torch.cuda.Event(blocking=True) for _ in buffers]
    for turn, begin in enumerate(range(0, target.numel(), _BOUNCE_NBYTES)):
        event, buffer = events[turn % 4], buffers[turn % 4]
        part = target[begin : begin + _BOUNCE_NBYTES]
        if turn >= 4:
            event.synchronize()
        os.preadv(held._fd, [buffer.numpy().data[: part.numel()]], held._offset + begin)
        part.copy_(buffer[: part.numel()], non_blocking=pinned)
        event.record()


def _straight(held: OfferedSlot, target: torch.Tensor) -> None:
    """Copy from the mapping of the slot, in the same parts as page-locking."""
    begin = 0
    first = CHUNK_NBYTES - held._offset % CHUNK_NBYTES
    for border in (*range(first, target.numel(), CHUNK_NBYTES), target.numel()):
        end = min(border, target.numel())
        target[begin:end].copy_(held.data[begin:end], non_blocking=True)
        begin = end
