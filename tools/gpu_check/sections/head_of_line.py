"""Waits of training's calls behind the copies of a save, by number of connections.

CUDA reads CUDA_DEVICE_MAX_CONNECTIONS when a process starts to use it, so each value has a process.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save.stager import Stager
from tests.support.staging import TensorCopy, stage
from tools.gpu_check import machine
from tools.gpu_check.process import Child, wait
from tools.gpu_check.report import Report

#: Number of copied saves.
_SAVES = 5
#: Number of calls without a save.
_CALLS = 50
_ITEM, _TIMERS = ".item()", "two of Megatron's timers"

#: Values of the variable; None: the variable is not set. Megatron often requires 1.
_CONNECTIONS = ("1", None)
_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"

Waits = dict[str, list[float]]


def run(report: Report) -> None:
    """Run a process for each value of CUDA_DEVICE_MAX_CONNECTIONS, one after the other."""
    os.environ.pop(_VARIABLE, None)
    with tempfile.TemporaryDirectory(prefix="h-") as directory:
        for connections in _CONNECTIONS:
            environment = {} if connections is None else {_VARIABLE: connections}
            child = Child(
                "tools.gpu_check.sections.head_of_line:measure", Path(directory), environment
            )
            wait([child], machine.seconds_left() - 1.0)
            child.pass_on(report, figures=True)
            if child.status != 0:
                report.must("the process that calls ends well", False, child.output)


def measure(report: Report) -> None:
    """Time calls without a save, and during saves."""
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
    if machine.simulated_node is not None:
        machine.simulated_node.d2h_bytes_per_s = 40e6
    nbytes = machine.pick(4 << 30, 8 << 20)
    with machine.staging(1, nbytes, part_nbytes=1 << 18) as (slab, stager):
        stager.pin(None)
        stager.wait_pinned()
        bench = Bench(nbytes, slab, stager)
        waits = {"no save": bench.alone()}
        waits["during saves"], copied_s = bench.during_saves()
    _check(report, connections, waits["during saves"], copied_s)
    for name, (when, measured) in itertools.product(bench.calls, waits.items()):
        what = f"{name}, {when}, MAX_CONNECTIONS {connections}: longest wait"
        if not (seconds := measured[name]):
            report.skip(what, "no call was made in time")
            continue
        is_main = (name, when, connections) == (_ITEM, "during saves", "1")
        median = f"median {1000 * statistics.median(seconds):.3f} ms of {len(seconds)}"
        report.figure(what, 1000 * max(seconds), "ms", median, headline=is_main)


def _check(report: Report, connections: str, waits: Waits, copied_s: float) -> None:
    for name in (_ITEM, _TIMERS):
        # The median counts, because other load on this machine may delay any call.
        wait = statistics.median(waits[name]) if waits[name] else copied_s
        report.must(
            f"MAX_CONNECTIONS {connections}: {name} waits for less than a quarter of the copies",
            wait < copied_s / 4,
            f"{1000 * wait:.2f} of {1000 * copied_s:.0f} ms",
        )


class Bench:
    def __init__(self, nbytes: int, slab: Slab, stager: Stager) -> None:
        from megatron.core.timers import Timers

        self._slab, self._stager = slab, stager
        self._source = torch.zeros(nbytes // 4, dtype=torch.int32, device="cuda")
        self._timers = Timers(0, "minmax")
        self._timers("interval-time", log_level=0).start()
        loss = torch.tensor(3.5, device="cuda")
        small = torch.zeros(256, device="cuda")
        batch = torch.zeros(1 << 18, pin_memory=True)
        self._allocated: list[torch.Tensor] = []
        self.calls: dict[str, Callable[[], object]] = {
            _ITEM: loss.item,
            _TIMERS: self._use_timers,
            ".cpu() of 1 KiB": small.cpu,
            "1 MiB to the device": batch.cuda,
            "cudaMalloc of 32 MiB": self._allocate,
        }

    def _use_timers(self) -> None:
        """Stop a timer and start it, as `save_checkpoint_and_time` does; both synchronize."""
        self._timers("interval-time").stop()
        self._timers("interval-time").start()

    def _allocate(self) -> None:
        """Allocate memory that torch's allocator must request from the driver."""
        if len(self._allocated) < 200:
            numel = machine.pick(32 << 20, 1 << 12)
            self._allocated.append(torch.empty(numel, dtype=torch.uint8, device="cuda"))

    def alone(self) -> Waits:
        """Return the seconds of every call, `_CALLS` times each, with an idle device."""
        waits: Waits = {name: [] for name in self.calls}
        for _, name in itertools.product(range(_CALLS + 1), self.calls):
            self._time(name, waits)
        self._free()
        # The first calls set things up.
        return {name: seconds[1:] for name, seconds in waits.items()}

    def during_saves(self) -> tuple[Waits, float]:
        """Return the seconds of every call during the copies of a save, and those of the copies."""
        waits: Waits = {name: [] for name in self.calls}
        copied: list[float] = []
        copy = TensorCopy(self._source, self._slab.slots[0].data_offset, early=False)
        names = itertools.cycle(self.calls)
        for _ in range(_SAVES):
            started = time.perf_counter()
            stage(self._stager, [copy], lambda *_: copied.append(time.perf_counter()))
            time.sleep(machine.pick(0.005, 0.02))  # the first copies are under way then
            while machine.is_copying(self._stager):
                self._time(next(names), waits)
            self._stager.wait()
            copied[-1] -= started
            self._free()
        return waits, statistics.median(copied)

    def _time(self, name: str, waits: Waits) -> None:
        started = time.perf_counter()
        self.calls[name]()
        waits[name].append(time.perf_counter() - started)

    def _free(self) -> None:
        self._allocated.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
