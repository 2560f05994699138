"""Jobs that differ in flags, each run with Megatron's own functions and with ours, side by side."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.support.megatron_jobs import REPO, run_job, succeeded

CELLS = REPO / "tests/support/jobs/flag_cells.py"
DOORS = ("stock", "ours")
SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4"
).split()
TORCH = "--bf16 --train-iters 4 --ckpt-format torch"
DIST = "--bf16 --train-iters 4 --ckpt-format torch_dist"
EVERY_2 = "--save {save} --save-interval 2"


@dataclasses.dataclass(frozen=True)
class Job:
    """One call of `pretrain`, once per door."""

    name: str
    flags: str
    """`{save}` is the job's directory, `{NAME}` that of job NAME, at the same door; `{stock:NAME}`
    is stock's."""
    copy: tuple[str, int] | None = None
    """Start with the directory of that job, as it was at that iteration."""
    doors: tuple[str, ...] = DOORS
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the cell, see `flag_cells.py`."""


def resumed(name: str, flags: str, **options: Any) -> list[Job]:
    """Return a job of 4 iterations, and one that goes on from what that had saved at 2."""
    return [
        Job(name, f"{flags} {EVERY_2}", options=options),
        Job(f"{name}-2", f"{flags} {EVERY_2} --load {{save}}", (name, 2), options=options),
    ]


@dataclasses.dataclass
class Ran:
    """What became of a job at one door."""

    save: Path
    ended: Any
    losses: list[list[Any]]
    iteration: int | None
    """That Megatron says it has loaded."""
    output: str
    logged: str
    hooks: list[list[Any]]
    scalars: list[str]

    @property
    def left(self) -> tuple[list[str], str | None]:
        """The checkpoints that are there, and what the tracker says."""
        tracker = self.save / "latest_checkpointed_iteration.txt"
        names = sorted(path.name for path in self.save.glob("iter_*"))
        return names, tracker.read_text() if tracker.exists() else None


Runs = dict[str, dict[str, Ran]]


def run_jobs(where: Path, jobs: list[Job], *, ranks: int) -> Runs:
    """Run all jobs, one after the other, in one process per rank; what rank 0 saw, by name."""
    cells = []
    for job in jobs:
        for door in job.doors:
            save = where / door / job.name
            (save if job.copy is None else save.parent).mkdir(parents=True, exist_ok=True)
            places = {other.name: str(where / door / other.name) for other in jobs}
            places |= {f"stock:{other.name}": str(where / "stock" / other.name) for other in jobs}
            flags = job.flags.replace("{save}", str(save))
            for name, place in places.items():
                flags = flags.replace(f"{{{name}}}", place)
            copy = []
            if job.copy is not None:
                copy = [[places[job.copy[0]], str(save), job.copy[1]]]
            cell = {"name": job.name, "door": door, "arguments": flags.split(), "copy": copy}
            cells.append({**cell, **job.options})
    (where / "cases.json").write_text(json.dumps(cells))
    done = succeeded(
        run_job(
            *(where, "flags", SMALL),
            ranks=ranks,
            door="stock",
            script=CELLS,
            timeout_s=270,
            # Stock's asynchronous writers are processes, which a forked rank cannot start.
            torchrun=True,
            env={"CASES": str(where / "cases.json")},
        )
    )
    runs: Runs = {}
    for event in done.events:
        name, door = event.pop("event"), event.pop("door")
        if event.pop("rank") == 0:
            runs.setdefault(name, {})[door] = Ran(save=where / door / name, **event)
        elif not runs[name][door].losses:  # with pipelining the last stage has them
            runs[name][door].losses = event["losses"]
    return runs
