"""Another process of the node, which asks the driver for things all the time.

It notes when each call began and how long it took, and ends when the file `stop` appears.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from tests.gpu_check.report import Report

LETTER = "-"
TITLE = "calls of another process"
SECONDS = 120
GPUS = 1
SIMULATED = True

#: Name of the file with one line for each call: its name, when it began, and its seconds.
CALLS = "bystander.calls"
_PAUSE_S = 0.002


def run(report: Report) -> None:
    """Call `cudaMemGetInfo` and `cudaMalloc` in turn until the end."""
    where = Path(os.environ["WHERE"])
    torch.cuda.mem_get_info()
    report.note("the bystander", "is ready")
    with (where / CALLS).open("w") as file:
        while not (where / "stop").exists():
            started = time.monotonic()
            torch.cuda.mem_get_info()
            asked = time.monotonic()
            block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            allocated = time.monotonic()
            del block
            torch.cuda.empty_cache()
            print("cudaMemGetInfo", started, asked - started, file=file)
            print("cudaMalloc", asked, allocated - asked, file=file)
            time.sleep(_PAUSE_S)
