"""One rank of `scripts/bench save`: measures all systems in turn, A B C B C A ..., in one job.

torchrun starts a job to save, a second one, like a restart, to load, and further ones in empty
directories for first saves. Rank 0 writes a line of figures for each size. If ranks differ, the
slowest rank counts.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import sys
import warnings
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.compare.job import Job, Size
from benchmarks.compare.loads import from_memory, loads
from benchmarks.compare.saves import busy, memory, saves
from benchmarks.compare.training import training

_TIMEOUT = datetime.timedelta(seconds=90)


def main(order: str) -> None:
    """Carry out the order of `driver.run_sizes`, a JSON object."""
    given = json.loads(order)
    mode, names, root = given["mode"], given["names"], Path(given["root"])
    sizes = [Size(**size) for size in given["sizes"]]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    for number, size in enumerate(sizes):
        where = root if len(sizes) == 1 else root / f"{number}"
        where.mkdir(exist_ok=True)
        job = Job(names, size, where)
        measure(mode, job)
        if job.rank == 0:
            with open(given["out"], "a") as out:
                out.write(json.dumps(job.figures()) + "\n")
        dist.barrier()
        job.close(keep=mode in ("save", "save-once"))  # the next job loads
        dist.barrier()
        if len(sizes) > 1:
            shutil.rmtree(where, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # Processes, threads and exit handlers of other systems would wait for each other.
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(0)


def measure(mode: str, job: Job) -> None:
    if mode == "save-once":
        saves(job, 0)
    elif mode == "first":
        saves(job, job.size.saves, raw_writes=False)
    elif mode == "grow":
        # The ranks that have saved also load, because a start of all ranks for each size would
        # take longer than all measurements.
        saves(job, job.size.saves)
        loads(job, job.size.loads)
    elif mode == "save":
        saves(job, job.size.saves)
        training(job, job.size.train_saves)
        memory(job)
        busy(job)
        from_memory(job, job.size.loads)
    else:
        loads(job, job.size.loads)


if __name__ == "__main__":
    main(sys.argv[1])
