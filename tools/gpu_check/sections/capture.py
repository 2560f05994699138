"""Rule: calls of the package's threads break no graph that training captures in global mode.

Those threads put themselves into relaxed capture mode.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from megatron_flashckpt.memory import cuda
from megatron_flashckpt.save import stager as stager_module
from tools.gpu_check import machine
from tools.gpu_check.report import Report

#: Seconds before the driver's limit at which this section stops.
_LEAST_S = 12.0
_RELAXED = 2


def run(report: Report) -> None:
    """Capture in a loop while a slab is made, page-locked, filled, and written by a real agent."""
    _check_mode(report)
    part = machine.pick(stager_module.PART_NBYTES, 1 << 18)
    captures = _Captures()
    with mock.patch.object(stager_module, "PART_NBYTES", part):
        for number in range(machine.pick(2, 1)):
            if number and machine.seconds_left() < _LEAST_S:
                report.skip(f"start {number + 1} of a job", "no time left")
                break
            try:
                _job(report, captures)
            except (RuntimeError, AssertionError) as error:
                report.must("no capture fails", False, f"{type(error).__name__}: {error}")
                return
    for during, count in captures.count.items():
        report.figure(f"captures {during}", count, "captures")
    total = sum(captures.count.values())
    report.figure("captures, none failed", total, "captures", headline=True)
    report.must("captured steps change what they should", captures.are_right())


def _check_mode(report: Report) -> None:
    """Check that `enter_thread` puts the calling thread into relaxed capture mode."""
    library = cuda.runtime_library()
    report.must("the CUDA runtime that torch has loaded is found", library is not None)
    if library is None:
        return
    modes: list[int] = []

    def enter() -> None:
        cuda.enter_thread(torch.cuda.current_device())
        mode = ctypes.c_int(_RELAXED)
        status = library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        modes.extend((status, mode.value))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    report.must("a thread of ours is in relaxed capture mode", modes == [0, _RELAXED], str(modes))


class _Captures:
    """Captures a step that counts in a small tensor, and replays it."""

    def __init__(self) -> None:
        self._weight = torch.zeros(1000, device="cuda")
        self._stream = torch.cuda.Stream()
        self.count: dict[str, int] = {}
        """Number of captures by the concurrent work of our threads."""

    def capture(self, during: str, before: Any = None) -> None:
        """Capture a step and replay it; `before` is called inside the capture, like a pre-hook."""
        with machine.captured(self._stream) as graph:
            if before is not None:
                before()
            self._weight.add_(torch.ones_like(self._weight))
        graph.replay()
        self.count[during] = self.count.get(during, 0) + 1

    def are_right(self) -> bool:
        values = self._weight.cpu()
        return torch.equal(values, torch.full_like(values, sum(self.count.values())))


def _job(report: Report, captures: _Captures) -> None:
    from tools.gpu_check.rank import node

    with node() as made:
        tensors = list(_tensors())
        rank = made.rank(tensors)
        link = rank.checkpointer.link
        link.prepare(rank.nbytes + (1 << 20))
        preparing = threading.Thread(target=link.wait_for_device_work)
        preparing.start()
        while preparing.is_alive():
            captures.capture("while a slab is made and page-locked")

        def capture_while_saving() -> None:
            for _ in range(5):
                captures.capture("while copies are made")
            captures.capture("that wait for copies", rank.before_step)
            deadline = time.monotonic() + machine.pick(2.0, 0.2)
            while rank.checkpointer.pending and time.monotonic() < deadline:
                rank.checkpointer.saves.poll()
                captures.capture("while the agent writes")

        for iteration in (1, 2):
            made.check_save(report, rank, iteration, capture_while_saving)


def _tensors() -> Iterator[torch.Tensor]:
    numel = machine.pick(32 << 20, 200_000)
    for number in range(8):
        yield torch.full((numel,), float(number), device="cuda")
