"""Loads of all systems in turn: page cache cold and warm, and from memory.

Each load is compared with its limit, which is measured right before it. For the limit, all ranks at
once copy the state, or read the same number of bytes, into memory that is already mapped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from benchmarks.compare.job import Job, slowest
from benchmarks.resources import drop_from_cache, write_raw
from benchmarks.workload import State

#: Size of plain reads.
_READ_NBYTES = 4 << 20
_PAGE = 4096


def from_memory(job: Job, rounds: int) -> None:
    """Measure loads from memory of systems whose memory ends with the ranks that saved."""
    for _, name in job.interleaved(rounds):
        if not job.systems[name].memory_survives:
            _load(job, name, "memory", job.systems[name].load_from_memory, job.memcpy_s)


def loads(job: Job, rounds: int) -> None:
    """Measure loads in ranks that have just started: page cache cold and warm, and memory."""
    raw = _RawFile(job)
    for _, name in job.interleaved(rounds):
        system = job.systems[name]
        files = [path for path in system.root.rglob("*") if path.is_file()]

        def cold_s(files: list[Path] = files) -> float:
            if job.rank == 0:
                drop_from_cache(files)
            return raw.cold_s()

        _load(job, name, "cold", system.load, cold_s)
        if name in job.systems:
            _load(job, name, "warm", system.load, raw.warm_s)
        if name in job.systems and system.memory_survives:
            _load(job, name, "memory", system.load_from_memory, job.memcpy_s)
    raw.path.unlink()


def _load(
    job: Job,
    name: str,
    how: str,
    load: Callable[[State], int | None],
    limit: Callable[[], float],
) -> None:
    """Measure one load, from its call on all ranks to its return on the last rank."""
    limit_s = limit()
    job.state.memory.zero_()
    with job.reported(name, f"load, {how}"):
        dist.barrier()
        with job.systems[name].watch_load() as parts:
            started, cpu = time.perf_counter(), time.process_time()
            step = load(job.state)
            took, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        times = {f"{how}_s": slowest(took), f"{how}_cpu_s": slowest(cpu_s)}
        times |= {f"{how}_{part}_s": slowest(seconds) for part, seconds in parts.items()}
        if step is None:
            return
        wrong = job.state.wrong(step)
        if wrong:
            raise RuntimeError(f"step {step}: {len(wrong)} tensors are wrong: {wrong[:3]}")
        job.note(name, **times, **{f"{how}_limit_s": limit_s})


class _RawFile:
    """File of this rank, as long as the state, for plain reads by all ranks."""

    def __init__(self, job: Job) -> None:
        self.path = job.root / f"raw_{job.rank}"
        self._view = memoryview(job.scratch.numpy())
        write_raw(self.path, self._view, direct=False)
        self._note = job.note_limit

    def warm_s(self) -> float:
        self._read(0)
        return self._note("read_warm_s", self._read(0))

    def cold_s(self) -> float:
        """Return the faster time: through the page cache with read-ahead, or with O_DIRECT."""
        times = []
        for flags in (0, os.O_DIRECT):
            drop_from_cache([self.path])
            times.append(self._read(flags))
        return self._note("read_cold_s", min(times))

    def _read(self, flags: int) -> float:
        view = self._view if not flags else self._view[: len(self._view) // _PAGE * _PAGE]
        fd = os.open(self.path, os.O_RDONLY | flags)
        try:
            dist.barrier()
            started = time.perf_counter()
            position = 0
            while position < len(view):
                position += os.preadv(fd, [view[position : position + _READ_NBYTES]], position)
            return slowest(time.perf_counter() - started)
        finally:
            os.close(fd)
