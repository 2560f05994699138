"""Rule: Megatron's timers and a `.item()` of training wait for few of the copies of a save."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from typing import Any
from unittest import mock

import torch

from megatron_flashckpt.memory.runs import Copy
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save import stager as stager_module
from megatron_flashckpt.save.stager import Stager
from tools.gpu_check import machine
from tools.gpu_check.report import Report

LETTER = "S"
TITLE = "timers and .item() behind a save"
SECONDS = 25
GPUS = 1
SIMULATED = True
MEGATRON = True
ALONE = True

_ROUNDS = 8
#: Seconds between a save and the timers, for a print and a barrier; the first copies are enqueued
#: then.
_BETWEEN_S = 0.005
#: Largest share of the copies that training's calls wait for, by the fields of `Round`. Each waits
#: for about one part of a hundred; an `.item()` is a copy, so it waits for the copy engine, too.
_LARGEST_SHARE = {"timers_s": 0.1, "item_s": 0.25}


@dataclasses.dataclass
class Round:
    """Seconds of a save and its waits, or of a pair of timers without a save."""

    blocked_s: float
    """Seconds until `stage` returned."""
    timers_s: float
    """Seconds in `stop` of one timer and `start` of the next, as in `save_checkpoint_and_time`."""
    item_s: float
    """Seconds in the first `.item()` after the timers."""
    step_s: float
    """Seconds until the training thread may enqueue the step."""
    copied_s: float
    """Seconds until all tensors are copied."""


def run(report: Report) -> None:
    """Time rounds with and without a save, in turn."""
    from megatron.core.timers import Timers

    part = machine.pick(stager_module.PART_NBYTES, 1 << 18)
    with mock.patch.object(stager_module, "PART_NBYTES", part):
        tensors = _tensors(part)
        slab = Slab.create(1, 4096, sum(tensor.nbytes for tensor in tensors), "timers")
        slab.populate()
        stager = Stager()
        stager.use(slab, device=torch.cuda.current_device())
        stager.pin(None)
        stager.wait_pinned()
        if machine.simulated_node is not None:
            machine.simulated_node.d2h_bytes_per_s = slab.geometry.data_capacity / 0.5
        timers = Timers(0, "minmax")
        timers("interval-time", log_level=0).start()
        timers("save-checkpoint", log_level=0)
        rounds = [
            (_round(timers, stager, slab, tensors), _round(timers, stager, slab, []))
            for _ in range(machine.pick(_ROUNDS, 3))
        ]
        stager.close()
        slab.close()
    _report_result(report, [saving for saving, _ in rounds], [empty for _, empty in rounds])


def _tensors(part: int) -> list[torch.Tensor]:
    """Return 100 tensors of a part each: 6.25 GiB on a GPU."""
    return [torch.full((part // 4,), float(n), device="cuda") for n in range(100)]


def _round(timers: Any, stager: Stager, slab: Slab, tensors: list[torch.Tensor]) -> Round:
    loss = torch.tensor(3.5, device="cuda")
    offset, copies = slab.slots[0].data_offset, []
    for tensor in tensors:
        copies.append(Copy(tensor, offset, early=False))
        offset += tensor.nbytes
    copied: list[float] = []
    timers("interval-time").stop()
    timers("save-checkpoint").start()
    times = [time.perf_counter()]

    def mark() -> None:
        times.append(time.perf_counter())

    stager.stage(copies, lambda *_: copied.append(time.perf_counter()))
    mark()
    time.sleep(_BETWEEN_S)
    mark()
    timers("save-checkpoint").stop()
    timers("interval-time").start()
    mark()
    loss.item()
    mark()
    stager.before_change()
    mark()
    stager.wait()
    blocked, _, in_timers, item, step = (b - a for a, b in itertools.pairwise(times))
    return Round(blocked, in_timers, item, step, copied[0] - times[0])


def _report_result(report: Report, saving: list[Round], empty: list[Round]) -> None:
    for name in ("blocked_s", "timers_s", "item_s", "step_s", "copied_s"):
        values, without = (
            [1000 * getattr(measured, name) for measured in rounds] for rounds in (saving, empty)
        )
        detail = f"largest {max(values):.2f}; without a save {statistics.median(without):.2f}"
        write = report.headline if name == "item_s" else report.figure
        write(_WHAT[name], statistics.median(values), "ms", detail)
    # The fastest round counts, because other load on this machine may delay any round.
    for name, largest in _LARGEST_SHARE.items():
        share = min(getattr(measured, name) / measured.copied_s for measured in saving)
        what = f"{_WHAT[name]} for less than {largest:.0%} of the copies"
        report.must(what, share < largest, f"{share:.1%}")


_WHAT = {
    "blocked_s": "stage() returns after",
    "timers_s": "the timers behind it wait",
    "item_s": "an .item() behind it waits",
    "step_s": "the training thread waits before its step",
    "copied_s": "all is copied after",
}
