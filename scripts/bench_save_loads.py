"""Loads of all systems in turn: page cache cold and warm, and from memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from bench_resources import drop_from_cache, write_raw
from bench_save_job import Job, slowest
from workload import State


def from_memory(job: Job, rounds: int) -> None:
    """Measure loads from memory of the systems whose memory ends with their ranks."""
    for _, name in job.turns(rounds):
        if not job.systems[name].memory_survives:
            _load(job, name, "memory", job.systems[name].load_from_memory)


def loads(job: Job, rounds: int) -> None:
    """Measure loads in ranks that have just started: page cache cold and warm, and memory."""
    for _, name in job.turns(rounds):
        system = job.systems[name]
        files = [path for path in system.root.rglob("*") if path.is_file()]
        if job.rank == 0:
            drop_from_cache(files)
        _load(job, name, "cold", system.load)
        if name in job.systems:
            _load(job, name, "warm", system.load)
        if name in job.systems and system.memory_survives:
            _load(job, name, "memory", system.load_from_memory)
    _raw_reads(job, rounds)


def _load(job: Job, name: str, how: str, load: Callable[[State], int | None]) -> None:
    memcpy_s = job.memcpy_s()
    job.state.memory.zero_()
    with job.reported(name, f"load, {how}"):
        dist.barrier()
        started = time.perf_counter()
        step = load(job.state)
        took = slowest(time.perf_counter() - started)
        if step is None:
            return
        wrong = job.state.wrong(step)
        if wrong:
            raise RuntimeError(f"step {step}: {len(wrong)} tensors are wrong: {wrong[:3]}")
        job.note(name, **{f"{how}_s": took, f"{how}_memcpy_s": memcpy_s})


def _raw_reads(job: Job, rounds: int) -> None:
    path = job.args.root / f"raw_{job.rank}"
    write_raw(path, job.scratch, direct=False)
    view = memoryview(job.scratch.numpy())
    limits = job.found.setdefault("limits", {})
    for _ in range(rounds):
        for name in ("read_cold_s", "read_warm_s"):
            if name == "read_cold_s":
                drop_from_cache([path])
            dist.barrier()
            started = time.perf_counter()
            with open(path, "rb", 0) as file:
                position = 0
                while position < len(view):
                    position += file.readinto(view[position : position + (4 << 20)])
            limits.setdefault(name, []).append(slowest(time.perf_counter() - started))
    path.unlink()
