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
from tools.gpu_check.timing import report_waits

LETTER = "-"
TITLE = "waits of small copies"
SECONDS = 60
GPUS = 1
SIMULATED = True

#: Number of copied saves for each window.
_SAVES = 10
_ALL_PARTS = 10**9


def run(report: Report) -> None:
    """Time calls without a save, during a save, and during one that enqueues all copies at once."""
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
    nbytes = machine.pick(4 << 30, 8 << 20)
    if machine.simulated_node is not None:
        machine.simulated_node.d2h_bytes_per_s = 40e6
    part = machine.pick(stager_module.PART_NBYTES, 1 << 18)
    window = stager_module.PARTS_IN_FLIGHT
    bench = Bench(nbytes)
    with mock.patch.object(stager_module, "PART_NBYTES", part):
        alone = bench.alone()
        usual = bench.beside_saves(window)
        unlimited = bench.beside_saves(_ALL_PARTS)
    for name in bench.calls:
        what = f"MAX_CONNECTIONS {connections}: {name}"
        report_waits(report, f"{what}, no save", alone[name])
        report_waits(report, f"{what}, {window} parts enqueued", usual[name])
        report_waits(report, f"{what}, all enqueued", unlimited[name])
        if usual[name] and unlimited[name]:
            factor = max(unlimited[name]) / max(usual[name])
            report.figure(f"{what}: longest wait, all enqueued over {window} parts", factor, "x")
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
            ".tolist() of 1 KiB": small.tolist,
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
        """Return the seconds of every call, 50 times each, with an idle device."""
        self._call_all({name: [] for name in self.calls})  # the first calls set things up
        waits: dict[str, list[float]] = {name: [] for name in self.calls}
        for _ in range(50):
            self._call_all(waits)
        self._free()
        return waits

    def beside_saves(self, window: int) -> dict[str, list[float]]:
        """Return the seconds of every call that was made during the copies of a save.

        Args:
            window: largest number of enqueued, unfinished parts.
        """
        waits: dict[str, list[float]] = {name: [] for name in self.calls}
        copy = Copy(self._source, self._slab.slots[0].data_offset, early=False)
        names = itertools.cycle(self.calls)
        with mock.patch.object(stager_module, "PARTS_IN_FLIGHT", window):
            for _ in range(_SAVES):
                self._stager.stage([copy], lambda *_: None)
                job = self._stager._current
                # The copy thread fills its window first.
                time.sleep(machine.pick(0.005, 0.02))
                while job is not None and not job.copied.is_set():
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
