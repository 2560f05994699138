"""`python -m benchmarks train --gpu`: the cost of checkpoints on one GPU, in a limited time.

The rounds are those of the study on CPU ranks, with one rank. What differs: larger models, a time
limit for the whole study, ranks forked from a process that has made their imports, and restarts
in the first round only.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.study import Result
from benchmarks.train.measure import Session
from benchmarks.train.series import Budget, Series
from benchmarks.train.sizes import GPU_QUICK, GPU_SIZES, QUICK
from benchmarks.train.starts import IMPORTED
from benchmarks.train.systems import (
    GPU_ONLY,
    SYSTEMS,
    available,
    chosen,
    environment_of_one_rank,
    on_gpu,
)
from tools.gpu_check.forkserver import forkserver

RESULTS = Path(__file__).resolve().parents[1] / "results"
#: Figures that the tables show. Others depend on the start of the ranks, which is not a job's here.
COLUMNS = (
    "blocked_s",
    "lost_per_save_s",
    "first_save_step_s",
    "durable_s",
    "exit_s",
    "storage_load_s",
    "memory_load_s",
    "host_gb",
    "gb",
)
#: Seconds without output after which a job counts as hanging. Writing 18 GB takes 12 to 25 s.
_SILENCE_S = 45.0
#: Seconds after the budget's end at which a running job is ended.
_GRACE_S = 10.0


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield the figures of every model and system.

    Raises:
        SystemExit: there is no GPU, and `--quick` was not given.
    """
    quick = options.size == QUICK
    on_cpu = not torch.cuda.is_available()
    if on_cpu and not quick:
        raise SystemExit("--gpu: torch sees no GPU; --gpu --quick runs a tiny model on a CPU")
    ends_at = time.monotonic() + options.budget
    runnable = [system for system in (*SYSTEMS, *GPU_ONLY) if system.megatron == "installed"]
    systems, left_out = available(chosen(runnable, options.systems))
    with forkserver(IMPORTED, environment_of_one_rank(on_cpu=on_cpu)) as (found, _):
        if not found["forks"]:
            yield "every rank makes its own imports, because an import has started CUDA"
        for name, size in GPU_SIZES.items():
            if (name == GPU_QUICK) != quick:
                continue
            budget = Budget(ends_at - time.monotonic(), size.system_s)
            if shutil.disk_usage(root).free < size.disk_nbytes:
                yield f"{name}: left out, because it needs {size.disk_nbytes / 1e9:g} GB of disk"
                continue
            if not budget.has_time(name):
                yield f"{name}: left out, because no time is left (--budget)"
                continue
            megatrons = {"installed": on_gpu(size, on_cpu=on_cpu)}
            job_ends_at = budget.ends_at + _GRACE_S
            session = Session(
                size.schedule, root, size.timeout_s, silence_s=_SILENCE_S, ends_at=job_ends_at
            )
            yield from Series(systems, megatrons, size.schedule, budget).run(
                session,
                options.rounds or size.rounds,
                size=name,
                storage_mb_s=None,
                distributed_optimizer=True,
                ranks=1,
                columns=COLUMNS,
                forked=found["forks"],
                left_out=left_out,
            )
    if not quick and options.systems is None:
        # Only a run of all systems replaces the published figures.
        options.json = options.json or RESULTS / "train-gpu.json"
        options.png = options.png or RESULTS / "train-gpu.png"
