"""Copies of a save to host memory: their bytes and speed, and training's kernels beside them."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable

import torch

from megatron_flashckpt.memory.runs import Copy
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save.stager import Stager
from tools.gpu_check import machine
from tools.gpu_check.report import Report

#: Size of one comparison.
_CHUNK_NBYTES = 256 << 20
#: Bytes per second of the simulated engine, so that simulated copies take time.
_SIMULATED_RATE = 40e6
#: Smallest share of its speed that a matrix product keeps during copies; an H100 keeps 0.95.
_KEPT = 0.8

Copies = tuple[list[torch.Tensor], list[Copy]]


def run(report: Report) -> None:
    """Stage 8 GiB in 300, 2,000 and 20,000 tensors, with and without page-locked slots."""
    if machine.simulated_node is not None:
        machine.simulated_node.d2h_bytes_per_s = _SIMULATED_RATE
    nbytes = machine.pick((8 << 30) - 4096, 8 << 20)
    with machine.staging(1, nbytes, part_nbytes=1 << 18) as (slab, stager):
        bench = Bench(nbytes, slab, stager)
        counts = machine.pick((300, 2_000, 20_000), (30, 200))
        bench.measure(report, counts[0], "not page-locked")
        bench.pin(report)
        for count in counts:
            bench.measure(report, count, "page-locked")
        if machine.simulated_node is None:
            bench.report_product(report)


@dataclasses.dataclass
class Times:
    """Seconds of one save."""

    returned: float
    """Until `stage` returned."""
    kernels: list[float]
    """Of every small kernel that training ran meanwhile."""
    done: float
    """Until all was copied."""


class Bench:
    """Slab, stager and one buffer on the GPU, which is divided into tensors."""

    def __init__(self, nbytes: int, slab: Slab, stager: Stager) -> None:
        self.nbytes = nbytes
        self._slab, self._stager = slab, stager
        self.source = torch.arange(nbytes // 4, dtype=torch.int32, device="cuda")
        self._number = torch.zeros(1, device="cuda")

    def pin(self, report: Report) -> None:
        started = time.perf_counter()
        self._stager.pin(None)
        self._stager.wait_pinned()
        gib = self.nbytes / 2**30
        report.figure(f"page-locking of {gib:.2g} GiB", time.perf_counter() - started, "s")

    def copies(self, count: int) -> Copies:
        """Return the buffer as `count` tensors of unequal sizes, and their copies."""
        numel = self.source.numel()
        inner = random.Random(count).sample(range(1, numel), count - 1)
        borders = [0, *sorted(inner), numel]
        tensors = [self.source[begin:end] for begin, end in itertools.pairwise(borders)]
        return tensors, [Copy(number, 4 * begin) for number, begin in enumerate(borders[:-1])]

    def start(self, copies: Copies, finish: Callable[[float, BaseException | None], None]) -> None:
        """Stage into the slab's only slot."""
        tensors, late = copies
        data_offset = self._slab.slots[0].data_offset
        self._stager.stage(tensors, [], late, finish, data_offset=data_offset)

    def stage(self, copies: Copies, *, waits: bool) -> Times:
        """Stage once, with small kernels meanwhile.

        Args:
            waits: let the step wait at once, so that no pause is left between the copies.
        """
        errors: list[BaseException | None] = []
        kernels: list[float] = []
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.start(copies, lambda _, error: errors.append(error))
        returned = time.perf_counter() - started
        if waits:
            self._stager.before_change()
        while not waits and machine.is_copying(self._stager):
            begun = time.perf_counter()
            self._number.add_(1)
            torch.cuda.current_stream().synchronize()
            kernels.append(time.perf_counter() - begun)
            time.sleep(0.001)
        self._stager.wait()
        done = time.perf_counter() - started
        if errors != [None]:
            raise RuntimeError(f"not copied: {errors[0]}")
        return Times(returned, kernels, done)

    def measure(self, report: Report, count: int, memory: str) -> None:
        """Stage with and without a waiting step; compare all bytes."""
        name = f"{count} tensors, {memory}"
        copies = self.copies(count)
        usual = self.stage(copies, waits=False)
        self.source.add_(1)
        waiting = self.stage(copies, waits=True)
        is_main = memory == "page-locked" and count <= 1000
        rate = self.nbytes / usual.done / 1e9
        report.figure(f"copies of {name}", rate, "GB/s", headline=is_main)
        report.figure(f"{name}, when the step waits", self.nbytes / waiting.done / 1e9, "GB/s")
        report.figure(f"{name}: stage() returns in", 1000 * usual.returned, "ms")
        report.must(f"{name}: bytes are equal", self._is_equal())
        if is_main:  # with more tensors the calls take as long as the copies
            report.must(
                f"{name}: stage() returns before a quarter of the copies' time",
                usual.returned < usual.done / 4,
                f"{1000 * usual.returned:.1f} of {1000 * usual.done:.1f} ms",
            )
            # The driver's queue may be full, so enqueueing may last as long as the copies. What
            # counts is that the training thread launches kernels, and that these run meanwhile.
            wait = statistics.median(usual.kernels) if usual.kernels else usual.done
            report.must(
                f"{name}: training's kernels run beside the copies",
                wait < usual.done / 4,
                f"{len(usual.kernels)} kernels, median {1000 * wait:.2f} ms",
            )

    def _is_equal(self) -> bool:
        begin = self._slab.slots[0].data_offset
        slot = torch.frombuffer(self._slab.memory[begin : begin + self.nbytes], dtype=torch.int32)
        numel = min(_CHUNK_NBYTES // 4, slot.numel())
        # A copy from the slot to the GPU might cross the border of two page-locked chunks.
        buffer = torch.empty(numel, dtype=torch.int32, pin_memory=True)
        return all(
            torch.equal(buffer[: part.numel()].copy_(part), held)
            for held, part in zip(slot.split(numel), self.source.split(numel), strict=True)
        )

    def report_product(self, report: Report) -> None:
        """Multiply matrices with and without concurrent copies, in turn."""
        left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
        copies = self.copies(300)
        rates: dict[bool, list[float]] = {True: [], False: []}

        def multiply() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(80):  # about 110 ms on an H200, where copies of 8 GiB take 160 ms
                left @ right
            end.record()
            end.synchronize()
            return 80 * 2 * 8192**3 / (begin.elapsed_time(end) / 1000) / 1e12

        multiply()
        for _ in range(5):
            rates[False].append(multiply())
            self.start(copies, lambda *_: None)
            rates[True].append(multiply())
            self._stager.wait()
        alone, during_copies = (statistics.median(rates[copying]) for copying in (False, True))
        report.figure("bf16 matrix product, alone", alone, "TFLOP/s")
        report.figure("bf16 matrix product, during copies", during_copies, "TFLOP/s")
        report.must(
            f"a matrix product keeps {_KEPT:.0%} of its speed during copies",
            during_copies > _KEPT * alone,
            f"{during_copies / alone:.1%}",
        )
