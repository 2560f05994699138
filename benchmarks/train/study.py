"""Cost of checkpoints in real Megatron training, by the wall clock of its own training loop.

Two CPU ranks, which keep two cores busy, train the same model on the same data with every system
(`systems.py`), and once without saves. A round runs every system once; the order changes from round
to round. A system has a result in a round only if its losses equal those of the run without saves,
before and after a restart from its checkpoint. Before new ranks load from storage, the checkpoint
is dropped from the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.study import Result, Study
from benchmarks.train.job import RANKS, Megatron
from benchmarks.train.measure import Session
from benchmarks.train.report import document, read_figures
from benchmarks.train.series import Budget, Series
from benchmarks.train.sizes import GPU_QUICK, GPU_SIZES, LARGE, QUICK, SIZES, USUAL
from benchmarks.train.starts import IMPORTED
from benchmarks.train.storage_limit import StorageLimit
from benchmarks.train.systems import (
    GPU_ONLY,
    SYSTEMS,
    System,
    UnavailableError,
    available,
    chosen,
    environment_of_one_rank,
    installed,
    old_trees,
    on_gpu,
)
from tools.gpu_check.forkserver import forkserver

RESULTS = Path(__file__).resolve().parents[1] / "results"
#: Figures that the tables show. Others depend on the start of the ranks, which is not a job's here.
GPU_COLUMNS = (
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
#: System load above which other processes distort the figures.
_QUIET_LOAD = 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick and --large")
    sizes = parser.add_mutually_exclusive_group()
    size = {"dest": "size", "action": "store_const", "default": USUAL}
    sizes.add_argument(
        "--quick", const=QUICK, help="a small model, as a test that all systems run", **size
    )
    sizes.add_argument(
        "--large", const=LARGE, help="a model with 1.5 GB of state for each rank", **size
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="one rank on one GPU; with --quick a tiny model, without a GPU on a CPU",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=360.0,
        metavar="S",
        help="with --gpu: seconds for the whole study (default: %(default)g)",
    )
    names = [system.name for system in (*SYSTEMS, *GPU_ONLY)]
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=names,
        metavar="SYSTEM",
        help=f"names of {', '.join(names)} (default: all)",
    )
    parser.add_argument(
        "--dlrover", type=Path, help="directory in which DLRover is installed and kept"
    )
    parser.add_argument(
        "--storage-mb-s", type=float, metavar="MB", help="limit of the storage bandwidth, MB/s"
    )
    parser.add_argument(
        "--replicated-optimizer",
        action="store_true",
        help="train without --use-distributed-optimizer",
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        nargs="?",
        const=RESULTS / "train.json",
        metavar="FILE",
        help="only print the table of an earlier run (default: the published one)",
    )


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    if options.markdown:
        yield document(read_figures(options.markdown))
        return
    if options.gpu:
        yield from run_on_gpu(options, root)
        return
    size = SIZES[options.size]
    rounds, schedule = options.rounds or size.rounds, size.schedule
    if shutil.disk_usage(root).free < (needed := size.disk_nbytes):
        raise SystemExit(
            f"{root}: needs {needed / 1e9:g} GB of free space; name another directory with --dir"
        )
    systems, lacking = available(chosen(SYSTEMS, options.systems))
    megatrons, left_out = _megatrons(systems, root, options)
    left_out |= lacking
    systems = [system for system in systems if system.megatron in megatrons]
    limit = StorageLimit.made(root, options.storage_mb_s) if options.storage_mb_s else None
    load = os.getloadavg()[0]
    yield from _reasons(left_out)
    yield (
        f"rounds: {rounds}, each {len(systems)} runs of {schedule.iterations} steps with "
        f"{schedule.saves + 1} saves: about "
        f"{rounds * len(systems) * size.system_s / 60:.1f} minutes on two quiet cores"
    )
    if load > _QUIET_LOAD:
        yield f"other processes keep this machine busy (load {load:.1f}): figures will be too high"
    session = Session(schedule, root, size.timeout_s, limit=limit)
    if options.size != QUICK:
        for name in sorted({system.megatron for system in systems if not system.saves}):
            session.warm_up(megatrons[name])
    yield from Series(systems, megatrons, schedule).run(
        session,
        rounds,
        load_before=load,
        size=options.size,
        storage_mb_s=options.storage_mb_s,
        distributed_optimizer=not options.replicated_optimizer,
        ranks=RANKS,
        left_out=left_out,
    )
    changed = (options.systems, options.storage_mb_s, options.replicated_optimizer)
    if options.size == USUAL and not any(changed):
        # Only a whole run replaces the published figures.
        options.json = options.json or RESULTS / "train.json"
        options.png = options.png or RESULTS / "train.png"


def run_on_gpu(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield the figures of every model and system on one GPU, in a limited time.

    The rounds are those of the study on CPU ranks, with one rank. What differs: larger models, a
    time limit for the whole study, ranks forked from a process that has made their imports, and
    restarts in the first round only.

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
    yield from _reasons(left_out)
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
                columns=GPU_COLUMNS,
                forked=found["forks"],
                left_out=left_out,
            )
    if not quick and options.systems is None:
        # Only a run of all systems replaces the published figures.
        options.json = options.json or RESULTS / "train-gpu.json"
        options.png = options.png or RESULTS / "train-gpu.png"


def _reasons(left_out: dict[str, str]) -> Iterator[str]:
    for name, reason in left_out.items():
        yield f"{name} was left out: {reason}"


def _megatrons(
    systems: list[System], root: Path, options: argparse.Namespace
) -> tuple[dict[str, Megatron], dict[str, str]]:
    """Return the Megatrons by name, and the reasons for left-out systems by label."""
    distributed = not options.replicated_optimizer
    megatrons = {"installed": installed(options.size, distributed=distributed)}
    left_out = {}
    if any(system.megatron != "installed" for system in systems):
        where = options.dlrover or root
        try:
            megatrons |= old_trees(root, where, options.size, distributed=distributed)
        except UnavailableError as error:
            left_out["DLRover"] = str(error)
    return megatrons, left_out


def draw(results: list[Result], path: Path) -> None:
    from benchmarks.train.chart import draw_figures

    draw_figures(results, path)


STUDY = Study("train", "cost of checkpoints in real Megatron training", add_options, run, draw)
