"""One rank of `scripts/bench save`: measures all systems in turn, A B C B C A ..., in one job.

Started by torchrun to save; then, as a job that restarts, to load; then again and again, each time
with nothing there yet, for first saves. Rank 0 writes what all ranks measured; where ranks differ,
the slowest one counts.
"""

from __future__ import annotations

import argparse
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

from benchmarks.compare.job import Job
from benchmarks.compare.loads import from_memory, loads
from benchmarks.compare.saves import busy, memory, saves
from benchmarks.compare.training import training

_TIMEOUT = datetime.timedelta(seconds=90)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("save", "save-once", "load", "first", "grow"))
    parser.add_argument("--systems", required=True, help="names, separated by commas")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nbytes", type=int, required=True, help="state of one rank, about")
    parser.add_argument("--pieces", type=int, required=True, help="tensors of one rank, about")
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--train-saves", type=int, required=True)
    parser.add_argument("--loads", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--sizes", type=json.loads, default=[], help="to grow: [[bytes, tensors]]")
    return parser.parse_args()


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    args = arguments()
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    job = grow(args) if args.mode == "grow" else measure(args)
    dist.barrier()
    job.close(keep=args.mode in ("save", "save-once"))  # a job that loads comes next
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # Other systems leave processes, threads and exit handlers that wait for each other.
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(0)


def measure(args: argparse.Namespace) -> Job:
    """Measure all that `scripts/bench save` reports."""
    job = Job(args)
    if args.mode == "save-once":
        saves(job, 0)
    elif args.mode == "first":
        saves(job, args.saves, raw_writes=False)
    elif args.mode == "save":
        saves(job, args.saves)
        training(job, args.train_saves)
        memory(job)
        busy(job)
        from_memory(job, args.loads)
    else:
        loads(job, args.loads)
    if job.rank == 0:
        args.out.write_text(found_by(job))
    return job


def found_by(job: Job) -> str:
    """Return what a rank has found, on one line."""
    limits = job.found.pop("limits", {})
    return json.dumps(
        {
            "rank_nbytes": job.state.nbytes,
            "pieces": len(job.state.tensors),
            "systems": job.found,
            "limits": limits,
        }
    )


def grow(args: argparse.Namespace) -> Job:
    """Measure saves and loads of ever larger states, one line of figures for each.

    Loads are into the ranks that have saved: a start of all ranks for each size would take longer
    than all that is measured.
    """
    for number, (nbytes, pieces) in enumerate(args.sizes):
        root = args.root / f"{number}"
        root.mkdir(exist_ok=True)
        given = {**vars(args), "nbytes": nbytes, "pieces": pieces, "root": root}
        job = Job(argparse.Namespace(**given))
        saves(job, args.saves)
        loads(job, args.loads)
        if job.rank == 0:
            with args.out.open("a") as out:
                out.write(found_by(job) + "\n")
        if number + 1 < len(args.sizes):
            job.close(keep=False)
            dist.barrier()
            shutil.rmtree(root, ignore_errors=True)
    return job


if __name__ == "__main__":
    main()
