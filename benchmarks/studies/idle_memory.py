"""Copies into memory that nobody has touched for a while, against copies into memory in use.

A save finds its slot as the one before the last left it: minutes ago. Where a host takes back what
its virtual machines do not use, the first copy into such memory waits for that host, and no process
in the machine sees a page fault of it.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections import defaultdict

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.workload import as_bytes, mapping
from megatron_flashckpt.memory.slab import Slab

_MS = 1000
_TOUCH_S = 1.0


def bench_idle(out: Console, mib: int, idle_s: float, rounds: int) -> None:
    """Print what one plain copy takes into each kind of memory: in use, left idle, and again."""
    nbytes = mib * 2**20
    torch.set_num_threads(1)
    source, used = as_bytes(mapping(nbytes)), as_bytes(mapping(nbytes))
    # The first copy after a pause waits for the processor, too: it is not that into a slot.
    idle = {"memory of the process": as_bytes(mapping(nbytes))}
    slabs = []
    for name, huge_pages in (("a slot of small pages", False), ("a slot", True)):
        slab = Slab.create(1, 0, nbytes, "idle", huge_pages=huge_pages)
        begin = slab.slots[0].data_offset
        memory = torch.frombuffer(slab.memory, dtype=torch.uint8)
        idle[name] = memory[begin : begin + nbytes]
        slabs.append(slab)
    for target in idle.values():
        _copied(target, source)
    copy_ms, _ = _copied(used, source)
    times: dict[str, list[float]] = defaultdict(list)
    faults = 0
    for _ in range(rounds):
        for target in idle.values():
            _copied(target, source)
        ends = time.monotonic() + idle_s
        while time.monotonic() < ends:
            copy_ms, _ = _copied(used, source)
            times["in use"].append(copy_ms)
            time.sleep(_TOUCH_S)
        for when in (f"idle for {idle_s:g} s", "again"):
            for name, target in idle.items():
                copy_ms, faulted = _copied(target, source)
                times[f"{name}, {when}"].append(copy_ms)
                faults += faulted
    table = Table("a copy into", "ms", "of one into memory in use")
    table.box = None
    usual = statistics.median(times["in use"])
    for name, found in times.items():
        copy_ms = statistics.median(found)
        table.add_row(name, f"{copy_ms:.0f}", f"{copy_ms / usual:.2f}")
    out.print(f"{mib} MiB; medians of {rounds}, interleaved; {faults} page faults in all of them")
    out.print(table)
    del memory, target, idle
    for slab in slabs:
        slab.close()


def _copied(target: torch.Tensor, source: torch.Tensor) -> tuple[float, int]:
    """Return the milliseconds, and the page faults, of a plain copy."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    started = time.perf_counter()
    target.view(torch.int64).copy_(source.view(torch.int64))
    took = time.perf_counter() - started
    return _MS * took, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
