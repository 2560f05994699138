"""`python -m benchmarks train --gpu`: the cost of checkpoints on one GPU, in a limited time.

The rounds are those of the study on CPU ranks, with one rank. What differs: larger models, a time
limit for the whole study, ranks forked from a process that has made their imports, and restarts
in the first round only.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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
    HANGING,
    SYSTEMS,
    System,
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this study has."""
    sizes = [name for name in GPU_SIZES if name != GPU_QUICK]
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
    parser.add_argument(
        "--models",
        nargs="+",
        choices=sizes,
        default=sizes,
        metavar="MODEL",
        help=f"with --gpu: {' or '.join(sizes)}, in the order of their runs (default: both)",
    )


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
    systems, left_out = available(chosen(_systems(quick=quick), options.systems))
    with contextlib.ExitStack() as stack:
        found, _ = stack.enter_context(forkserver(IMPORTED, environment_of_one_rank(on_cpu=on_cpu)))
        if not found["forks"]:
            yield "every rank makes its own imports, because an import has started CUDA"
        for name in [GPU_QUICK] if quick else options.models:
            yield from _Model(name, options, root, systems, left_out, found["forks"], on_cpu).run(
                ends_at
            )
    if not quick and options.systems is None:
        # Only a run of all systems replaces the published figures.
        options.json = options.json or RESULTS / "train-gpu.json"
        options.png = options.png or RESULTS / "train-gpu.png"


def _systems(*, quick: bool) -> list[System]:
    """Return the systems that run in the installed Megatron, in the order of the first round."""
    systems = [system for system in (*SYSTEMS, *GPU_ONLY) if system.megatron == "installed"]
    return [*systems, HANGING] if quick else systems


@dataclasses.dataclass(frozen=True)
class _Model:
    """One model of the study."""

    name: str
    options: argparse.Namespace
    root: Path
    systems: list[System]
    left_out: dict[str, str]
    forks: bool
    on_cpu: bool

    def run(self, ends_at: float) -> Iterator[Result]:
        """Yield the figures of all systems."""
        size = GPU_SIZES[self.name]
        rounds = self.options.rounds or size.rounds
        budget = Budget(ends_at - time.monotonic(), size.system_s)
        if shutil.disk_usage(self.root).free < size.disk_nbytes:
            yield f"{self.name}: left out, because it needs {size.disk_nbytes / 1e9:g} GB of disk"
            return
        if not budget.has_time(self.name):
            yield f"{self.name}: left out, because no time is left (--budget)"
            return
        megatron = on_gpu(size, on_cpu=self.on_cpu)
        session = Session(
            size.schedule,
            self.root,
            self.options.timeout_s or size.timeout_s,
            silence_s=_SILENCE_S,
            ends_at=budget.ends_at + _GRACE_S,
        )
        yield from Series(self.systems, {"installed": megatron}, size.schedule, budget).run(
            session,
            rounds,
            size=self.name,
            storage_mb_s=None,
            distributed_optimizer=True,
            ranks=1,
            columns=COLUMNS,
            forked=self.forks,
            left_out=self.left_out,
        )
