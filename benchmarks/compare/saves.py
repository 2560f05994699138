"""Saves of all systems in turn: blocked time, time until durable, CPU time, memory and disk."""

from __future__ import annotations

import time

import torch.distributed as dist

from benchmarks.compare.job import Job, slowest, total
from benchmarks.resources import Peak, ProcessTree, fsync, write_raw


def saves(job: Job, rounds: int, *, raw_writes: bool = True) -> None:
    """Set every system up and measure its first save, then later saves in turn.

    Args:
        raw_writes: measure a raw write of the state in every round, too.
    """
    job.state.fill()
    job.memcpy_s()
    for number, name in job.interleaved(rounds + 1):
        tree = ProcessTree(job.systems[name].pids)
        before = total(tree.memory_nbytes()) if number == 0 else 0.0
        with job.reported(name, "setup"):
            if number == 0:
                job.systems[name].setup(job.state)
                job.results[name] |= job.systems[name].figures
        if name not in job.systems:
            continue
        with job.reported(name, "save"):
            _one_save(job, name, tree, first=number == 0)
        if number == 0 and name in job.systems:
            job.results[name]["held_nbytes"] = total(tree.memory_nbytes()) - before
        if raw_writes and name == next(iter(job.systems), None):
            _raw_write(job)


def _one_save(job: Job, name: str, tree: ProcessTree, *, first: bool) -> None:
    system = job.systems[name]
    job.step += 1
    job.state.tag(job.step)
    memcpy_s = job.memcpy_s()
    cpu = tree.cpu_s()
    dist.barrier()
    started = time.perf_counter()
    saved = system.save(job.step, job.state)
    returned = time.perf_counter()
    system.settle(job.step)
    settled = time.perf_counter()
    system.wait(job.step)
    complete = time.perf_counter()
    times = [slowest(moment - started) for moment in (returned, settled, complete)]
    files = system.files(job.step)
    owed = time.perf_counter()
    if job.rank == 0:
        fsync(files)
    owed_s = slowest(time.perf_counter() - owed if job.rank == 0 else 0.0)
    values = {
        "blocked_s": times[0],
        "settled_s": times[1],
        "complete_s": times[2],
        "owed_s": owed_s,
        "durable_s": times[2] + owed_s,
        "memcpy_s": memcpy_s,
        "cpu_s": total(tree.cpu_s() - cpu),
    }
    if not saved:  # only after the collectives, which all ranks must reach
        raise RuntimeError(f"step {job.step} was left out")
    phases = system.phases(job.step)
    if first:
        job.results[name]["first"] = {**values, "phases": phases}
    else:
        job.note(name, **values, phases=phases)
    job.results[name]["files"] = len(files)
    job.results[name]["disk_nbytes"] = sum(path.stat().st_size for path in files)
    system.prune(job.step)


def _raw_write(job: Job) -> None:
    path = job.root / f"raw_{job.rank}"
    for name, direct in (("raw_direct_s", True), ("raw_buffered_s", False)):
        path.unlink(missing_ok=True)
        dist.barrier()
        took = write_raw(path, memoryview(job.scratch.numpy()), direct=direct)
        job.note_limit(name, slowest(took))
    path.unlink(missing_ok=True)


def memory(job: Job) -> None:
    """Measure the rise of all processes' memory during one more save."""
    for _, name in job.interleaved(1):
        system = job.systems[name]
        job.step += 1
        job.state.tag(job.step)
        tree = ProcessTree(system.pids)
        with job.reported(name, "memory"), Peak(tree.memory_nbytes, 0.02) as peak:
            system.save(job.step, job.state)
            system.settle(job.step)
            system.wait(job.step)
        if name in job.systems:
            entry = job.results[name]
            entry["transient_nbytes"] = total(peak.growth)
            entry["memory_nbytes"] = entry["held_nbytes"] + entry["transient_nbytes"]
            agents = tree.outside_nbytes()
            if agents:
                entry["agent_nbytes"] = agents
            system.prune(job.step)


def busy(job: Job) -> None:
    """Start three saves in a row, each before the last one is complete."""
    for _, name in job.interleaved(1):
        system = job.systems[name]
        if not system.background:
            continue
        first = job.step + 1
        took, said = [], []
        with job.reported(name, "busy"):
            for _ in range(3):
                job.step += 1
                job.state.tag(job.step)
                dist.barrier()
                started = time.perf_counter()
                saved = system.save(job.step, job.state)
                system.settle(job.step)
                took.append(slowest(time.perf_counter() - started))
                said.append("saved" if saved else "left out")
            newest = max(first + n for n, word in enumerate(said) if word == "saved")
            system.wait(newest)
            dist.barrier()
            job.results[name]["busy"] = {
                "blocked_s": took,
                "said": said,
                "latest": system.latest() - first + 1,
            }
