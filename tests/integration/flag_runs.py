"""Jobs that differ in their flags, each run with Megatron's own functions and with ours."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.support.megatron_jobs import REPO, differing, run_job, succeeded, tensors

CELLS = REPO / "tests/support/jobs/flag_cells.py"
ENTRY_POINTS = ("stock", "ours")
SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4"
).split()
TORCH = "--bf16 --train-iters 4 --ckpt-format torch"
DIST = "--bf16 --train-iters 4 --ckpt-format torch_dist"
EVERY_2 = "--save {save} --save-interval 2"


@dataclasses.dataclass(frozen=True)
class Job:
    """One call of `pretrain` for each entry point in `entry_points`."""

    name: str
    flags: str
    """`{save}` is the job's directory. `{NAME}` is the directory of job NAME at the same entry
    point, `{stock:NAME}` its directory at stock's."""
    copy: tuple[str, int] | None = None
    """Start with a copy of that job's directory as it was at that iteration."""
    entry_points: tuple[str, ...] = ENTRY_POINTS
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of the cell, see `flag_cells.py`."""


def resumed(name: str, flags: str, **options: Any) -> list[Job]:
    """Return a job of 4 iterations, and a second job that resumes from its save at iteration 2."""
    return [
        Job(name, f"{flags} {EVERY_2}", options=options),
        Job(f"{name}-2", f"{flags} {EVERY_2} --load {{save}}", (name, 2), options=options),
    ]


@dataclasses.dataclass
class JobResult:
    """Result of a job at one entry point."""

    save: Path
    ended: Any
    losses: list[list[Any]]
    iteration: int | None
    """Iteration that Megatron reports as loaded."""
    output: str
    logged: str
    hooks: list[list[Any]]
    scalars: list[str]

    @property
    def left(self) -> tuple[list[str], str | None]:
        """Return the names of the checkpoints in the directory, and the tracker's text.

        The end of a removed checkpoint stays for a while.
        """
        tracker = self.save / "latest_checkpointed_iteration.txt"
        directories = self.save.glob("iter_*")
        held = [path for path in directories if any(not f.match("*.end") for f in path.iterdir())]
        names = sorted(path.name for path in held)
        return names, tracker.read_text() if tracker.exists() else None


Runs = dict[str, dict[str, JobResult]]


def run_jobs(where: Path, jobs: list[Job], *, ranks: int, torchrun: bool = True) -> Runs:
    """Run all jobs in turn, in one process per rank; return rank 0's results by job name.

    Args:
        torchrun: stock's asynchronous writers need it: they are processes, which a forked rank
            cannot start.
    """
    cells = []
    for job in jobs:
        for entry_point in job.entry_points:
            save = where / entry_point / job.name
            (save if job.copy is None else save.parent).mkdir(parents=True, exist_ok=True)
            places = {other.name: str(where / entry_point / other.name) for other in jobs}
            places |= {f"stock:{other.name}": str(where / "stock" / other.name) for other in jobs}
            flags = job.flags.replace("{save}", str(save))
            for name, place in places.items():
                flags = flags.replace(f"{{{name}}}", place)
            copy = []
            if job.copy is not None:
                copy = [[places[job.copy[0]], str(save), job.copy[1]]]
            cell = {
                "name": job.name,
                "entry_point": entry_point,
                "arguments": flags.split(),
                "copy": copy,
            }
            options = json.dumps(job.options).replace("{save}", str(save))
            cells.append({**cell, **json.loads(options)})
    (where / "cases.json").write_text(json.dumps(cells))
    done = succeeded(
        run_job(
            *(where, "flags", SMALL),
            ranks=ranks,
            entry_point="stock",
            script=CELLS,
            timeout_s=270,
            torchrun=torchrun,
            env={"CASES": str(where / "cases.json")},
        )
    )
    runs: Runs = {}
    for event in done.events:
        name, entry_point = event.pop("event"), event.pop("entry_point")
        del event["attempt"]
        if event.pop("rank") == 0:
            runs.setdefault(name, {})[entry_point] = JobResult(
                save=where / entry_point / name, **event
            )
        elif not runs[name][entry_point].losses:  # under pipelining only the last stage has losses
            runs[name][entry_point].losses = event["losses"]
    return runs


def assert_equal_ends(runs: Runs, name: str) -> None:
    stock, ours = (runs[name][entry_point] for entry_point in ENTRY_POINTS)
    assert ours.ended == stock.ended, ours.output[-3000:]
    assert ours.losses == stock.losses
    assert ours.iteration == stock.iteration
    assert ours.left == stock.left


def assert_nothing_lost(runs: Runs, name: str) -> None:
    assert [runs[job]["ours"].ended for job in (name, f"{name}-2")] == ["end", "end"]
    whole, later = (runs[job]["ours"] for job in (name, f"{name}-2"))
    for ran in (whole, later):
        assert "was not saved" not in ran.logged, ran.logged
    assert later.iteration == 2
    assert later.losses == whole.losses[len(whole.losses) // 2 :]
    assert differing(tensors(whole.save, 4), tensors(later.save, 4)) == []
