"""Rank of a pair with a gloo process group, as under `--distributed-backend gloo`.

Each rank receives the data of the other rank directly into tensors on the GPU.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import torch.distributed as dist

from tools.gpu_check import machine
from tools.gpu_check.exchanges import report_collectives
from tools.gpu_check.report import Report


def run(report: Report) -> None:
    """Join the other rank and exchange data."""
    store = dist.FileStore(str(Path(os.environ["WHERE"]) / "store"), 2)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    report_collectives(report, "2 gloo ranks", machine.pick(256 << 20, 1 << 20))
    dist.barrier()
    dist.destroy_process_group()
