"""Another process of the node, which calls the GPU's driver continuously.

It records the start and the duration of each call, and ends when the file `stop` appears.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from tools.gpu_check.report import Report

LETTER = "-"
TITLE = "calls of another process"
SECONDS = 120
GPUS = 1
SIMULATED = True

#: Name of the file with one line per call: name, begin, and seconds.
CALLS = "bystander.calls"
_PAUSE_S = 0.002


def run(report: Report) -> None:
    """Call `cudaMemGetInfo` and `cudaMalloc` in turn until the file `stop` appears."""
    where = Path(os.environ["WHERE"])
    torch.cuda.mem_get_info()
    report.note("the bystander", "is ready")
    with (where / CALLS).open("w") as file:
        while not (where / "stop").exists():
            started = time.monotonic()
            torch.cuda.mem_get_info()
            called_at = time.monotonic()
            block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            allocated = time.monotonic()
            del block
            torch.cuda.empty_cache()
            print("cudaMemGetInfo", started, called_at - started, file=file)
            print("cudaMalloc", called_at, allocated - called_at, file=file)
            time.sleep(_PAUSE_S)
