"""One rank of `scripts/bench save`: measures all systems in turn, A B C B C A ..., in one job.

Started by torchrun twice: first to save, then, as a job that restarts, to load. Rank 0 writes what
all ranks measured; where ranks differ, the slowest one counts.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import sys
import warnings
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from bench_save_job import Job
from bench_save_loads import from_memory, loads
from bench_save_saves import busy, memory, saves
from bench_save_training import training
from megatron.core import parallel_state

_TIMEOUT = datetime.timedelta(seconds=90)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("save", "load"))
    parser.add_argument("--systems", required=True, help="names, separated by commas")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nbytes", type=int, required=True, help="state of one rank, about")
    parser.add_argument("--pieces", type=int, required=True, help="tensors of one rank, about")
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--train-saves", type=int, required=True)
    parser.add_argument("--loads", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    return parser.parse_args()


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    args = arguments()
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    job = Job(args)
    if args.mode == "save":
        saves(job, args.saves)
        training(job, args.train_saves)
        memory(job)
        busy(job)
        from_memory(job, args.loads)
    else:
        loads(job, args.loads)
    if job.rank == 0:
        state_nbytes = job.state.nbytes
        found = {
            "rank_nbytes": state_nbytes,
            "pieces": len(job.state.tensors),
            "systems": job.found,
        }
        found["limits"] = job.found.pop("limits", {})
        args.out.write_text(json.dumps(found))
    dist.barrier()
    job.close(keep=args.mode == "save")
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # Other systems leave processes, threads and exit handlers that wait for each other.
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
