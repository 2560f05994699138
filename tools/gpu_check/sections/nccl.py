"""Collectives of the package over NCCL with one rank, and over gloo with two ranks on one GPU."""

from __future__ import annotations

import datetime
import os
import tempfile
from pathlib import Path

import torch.distributed as dist

from tools.gpu_check import machine
from tools.gpu_check.exchanges import report_collectives
from tools.gpu_check.process import Child, wait
from tools.gpu_check.report import Report

_PATIENCE_S = 30.0


def run(report: Report) -> None:
    """Run the collectives over NCCL in this process, and over gloo in two others."""
    # A machine without a network may not resolve its own name.
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    with tempfile.TemporaryDirectory(prefix="n-") as directory:
        where = Path(directory)
        ranks = [
            Child("tools.gpu_check.exchanges", where, {"RANK": str(rank)}) for rank in range(2)
        ]
        _report_nccl(report, where, machine.pick("nccl", "gloo"))
        wait(ranks, _PATIENCE_S)
        for child in ranks:
            child.pass_on(report, figures=True)
            if child.status != 0:
                report.must("a gloo rank with a GPU ends well", False, child.output)


def _report_nccl(report: Report, where: Path, backend: str) -> None:
    """Run the collectives over NCCL; gloo on the simulated node."""
    store = dist.FileStore(str(where / "one"), 1)
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    report_collectives(report, f"1 {backend} rank", machine.pick(256 << 20, 1 << 20))
    dist.destroy_process_group()
