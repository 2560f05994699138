"""Collectives of the package over NCCL with one rank, and over gloo with two ranks on one GPU."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from pathlib import Path

import torch
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
        ranks = [Child("gloo_rank", where, {"RANK": str(rank)}) for rank in range(2)]
        _report_nccl(report, where, machine.pick("nccl", "gloo"))
        wait(ranks, _PATIENCE_S)
        for child in ranks:
            child.pass_on(report, figures=True)
            if child.status != 0:
                report.must("a gloo rank with a GPU ends well", False, child.output)


def _report_nccl(report: Report, where: Path, backend: str) -> None:
    """Run the collectives over NCCL (gloo on the simulated node); report the memory of groups."""
    before = _used_nbytes()
    store = dist.FileStore(str(where / "one"), 1)
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    report_collectives(report, f"1 {backend} rank", machine.pick(256 << 20, 1 << 20))
    world = _used_nbytes()
    report.figure("GPU memory of the first group", (world - before) / 2**20, "MiB")
    started = time.perf_counter()
    group = dist.new_group([0], timeout=timeout)
    dist.all_reduce(torch.zeros(1, device=machine.pick("cuda", "cpu")), group=group)
    torch.cuda.synchronize()
    report.figure("a further group: made and used in", time.perf_counter() - started, "s")
    report.figure("GPU memory of a further group", (_used_nbytes() - world) / 2**20, "MiB")
    dist.destroy_process_group(group)
    report.figure("GPU memory left by that group", (_used_nbytes() - world) / 2**20, "MiB")
    dist.destroy_process_group()


def _used_nbytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free
