"""Small copies and allocations of training during the copies of a large save.

CUDA reads CUDA_DEVICE_MAX_CONNECTIONS when a process starts to use it, so each value has a process.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from unittest import mock

import torch

from megatron_flashckpt.memory.runs import Copy
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save import stager as stager_module
from megatron_flashckpt.save.stager import Stager
from tools.gpu_check import machine
from tools.gpu_check.report import Report
from tools.gpu_check.timing import spread
from tools.gpu_check.variants import SHIPPED, VARIANTS

LETTER = "-"
TITLE = "waits of small copies"
SECONDS = 60
GPUS = 1
SIMULATED = True

#: Number of copied saves for each variant.
_SAVES = 5
#: Number of calls without a save.
_CALLS = 50


def run(report: Report) -> None:
    """Time calls without a save, and during saves of every variant."""
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
    nbytes = machine.pick(4 << 30, 8 << 20)
    if machine.simulated_node is not None:
        machine.simulated_node.d2h_bytes_per_s = 40e6
    part = machine.pick(stager_module.PART_NBYTES, 1 << 18)
    bench = Bench(nbytes)
    with mock.patch.object(stager_module, "PART_NBYTES", part):
        waits = {"no save": bench.alone()}
        for variant in VARIANTS:
            if variant.missing:
                report.skip(variant.name, f"this version has no {variant.missing}")
                continue
            with variant.applied():
                waits[variant.name] = bench.beside_saves()
    for name in bench.calls:
        for when, measured in waits.items():
            what = f"{name}, {when}, MAX_CONNECTIONS {connections}: longest wait"
            if not measured[name]:
                report.skip(what, "no call was made in time")
                continue
            is_main = (name, when, connections) == (".item()", SHIPPED.name, "1")
            write = report.headline if is_main else report.figure
            write(what, 1000 * max(measured[name]), "ms", spread(measured[name]))
    bench.close()


class Bench:
    """A slab, a stager, a large tensor to save, and the calls of training."""

    def __init__(self, nbytes: int) -> None:
        self._slab = Slab.create(1, 4096, nbytes, "small")
        self._slab.populate()
        self._stager = Stager()
        self._stager.use(self._slab, device=torch.cuda.current_device())
        self._stager.pin(None)
        self._stager.wait_pinned()
        self._source = torch.zeros(nbytes // 4, dtype=torch.int32, device="cuda")
        loss = torch.tensor(3.5, device="cuda")
        small = torch.zeros(256, device="cuda")
        batch = torch.zeros(1 << 18, pin_memory=True)
        self._allocated: list[torch.Tensor] = []
        self.calls: dict[str, Callable[[], object]] = {
            ".item()": loss.item,
            ".cpu() of 1 KiB": small.cpu,
            "1 MiB to the device": batch.cuda,
            "cudaMalloc of 32 MiB": self._allocate,
        }

    def _allocate(self) -> None:
        """Allocate memory that torch's allocator must request from the driver."""
        if len(self._allocated) < 200:
            numel = machine.pick(32 << 20, 1 << 12)
            self._allocated.append(torch.empty(numel, dtype=torch.uint8, device="cuda"))

    def alone(self) -> dict[str, list[float]]:
        """Return the seconds of every call, `_CALLS` times each, with an idle device."""
        self._call_all({name: [] for name in self.calls})  # the first calls set things up
        waits: dict[str, list[float]] = {name: [] for name in self.calls}
        for _ in range(_CALLS):
            self._call_all(waits)
        self._free()
        return waits

    def beside_saves(self) -> dict[str, list[float]]:
        """Return the seconds of every call that was made during the copies of a save."""
        waits: dict[str, list[float]] = {name: [] for name in self.calls}
        copy = Copy(self._source, self._slab.slots[0].data_offset, early=False)
        names = itertools.cycle(self.calls)
        for _ in range(_SAVES):
            self._stager.stage([copy], lambda *_: None)
            time.sleep(machine.pick(0.005, 0.02))  # the first copies are under way then
            while machine.is_copying(self._stager):
                self._time(next(names), waits)
            self._stager.wait()
            self._free()
        return waits

    def _call_all(self, waits: dict[str, list[float]]) -> None:
        for name in self.calls:
            self._time(name, waits)

    def _time(self, name: str, waits: dict[str, list[float]]) -> None:
        started = time.perf_counter()
        self.calls[name]()
        waits[name].append(time.perf_counter() - started)

    def _free(self) -> None:
        self._allocated.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def close(self) -> None:
        self._stager.close()
        self._slab.close()
