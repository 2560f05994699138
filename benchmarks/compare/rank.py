"""One rank of `scripts/bench save`: measures all systems in turn, A B C B C A ..., in one job.

torchrun starts a job to save, a second one, like a restart, to load, and further ones in empty
directories for first saves. Rank 0 writes the figures. If ranks differ, the slowest rank counts.
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
    parser.add_argument("--nbytes", type=int, required=True, help="approximate state of one rank")
    parser.add_argument("--pieces", type=int, required=True, help="approximate tensors of one rank")
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--train-saves", type=int, required=True)
    parser.add_argument("--loads", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--sizes", type=json.loads, default=[], help="grow: [[bytes, tensors]]")
    return parser.parse_args()


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    args = arguments()
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    job = grow(args) if args.mode == "grow" else measure(args)
    dist.barrier()
    job.close(keep=args.mode in ("save", "save-once"))  # the next job loads
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # Processes, threads and exit handlers of other systems would wait for each other.
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(0)


def measure(args: argparse.Namespace) -> Job:
    """Measure the figures of `scripts/bench save` for one mode."""
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
        args.out.write_text(encoded_figures(job))
    return job


def encoded_figures(job: Job) -> str:
    """Return the figures of a rank as one line of JSON."""
    limits = job.results.pop("limits", {})
    return json.dumps(
        {
            "rank_nbytes": job.state.nbytes,
            "pieces": len(job.state.tensors),
            "systems": job.results,
            "limits": limits,
        }
    )


def grow(args: argparse.Namespace) -> Job:
    """Measure saves and loads of growing states; write one line of figures per state.

    The ranks that have saved also load, because a start of all ranks for each size would take
    longer than all measurements.
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
                out.write(encoded_figures(job) + "\n")
        if number + 1 < len(args.sizes):
            job.close(keep=False)
            dist.barrier()
            shutil.rmtree(root, ignore_errors=True)
    return job


if __name__ == "__main__":
    main()
