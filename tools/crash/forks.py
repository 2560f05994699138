"""Cells of forks: real Megatron ranks fork helpers in the middle of a save or a load.

At the step each rank forks a helper that keeps running, and one that ends with `sys.exit`. Then one
rank is stopped there, and both ranks are killed. The next run resumes, forks at the same step, and
ends normally. Its agent must leave although the helpers still run. A helper may hold no memory of
the package and no connection to an agent.

Steps of agents are left out, because agents fork nothing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.support.processes import slabs_of, sockets_of
from tests.support.trainer import is_alive
from tools.crash import trouble
from tools.crash.cells import LOADING, SAVING
from tools.crash.family import AnyCell, RestorePoint
from tools.crash.helpers import end_helpers, helpers_in
from tools.crash.job import RANKS, CellError, Job
from tools.crash.start import RunPlan
from tools.crash.story import TRAINERS, Crash, check_end, check_load, crash_job
from tools.crash.truth import check_storage

HAPPENS = "forks helpers, is killed"
_SAVES = 3


@dataclasses.dataclass(frozen=True)
class Forks(AnyCell):
    """Ranks fork at `point`, and are killed when `rank` has hit that failpoint."""

    rank: int
    point: str
    count: int

    @property
    def place(self) -> tuple[tuple[str, str], str]:
        return (f"rank{self.rank}, forking", self.point), HAPPENS

    def __str__(self) -> str:
        return f"forks: rank{self.rank}:{self.point}:{self.count}, {HAPPENS}"

    def run(self, home: Path) -> None:
        job = Job(home)
        try:
            _run_scenario(self, job)
        finally:
            end_helpers(home)
            job.close()


def forks() -> list[AnyCell]:
    """Return all cells of forks; the stopped rank alternates."""
    steps = [*((point, 2) for point in SAVING), ("save.told", 2), *((p, 1) for p in LOADING)]
    return [Forks(number % RANKS, *step) for number, step in enumerate(steps)]


def _run_scenario(cell: Forks, job: Job) -> None:
    trouble.begin(job.save)
    plan = RunPlan(save=str(job.save), seed=1, saves=_SAVES)
    forking = dataclasses.replace(plan, forks=f"{cell.point}:{cell.count}")
    expected = RestorePoint()
    if cell.point.startswith("load."):
        first_crash = Crash("rank0", "save.told", 2, TRAINERS)
        job.start(plan, first_crash.fault, linger=True)
        expected = crash_job(job, first_crash, expected)
    crash = Crash(f"rank{cell.rank}", cell.point, cell.count, TRAINERS)
    job.start(forking, crash.fault, linger=True)
    expected = crash_job(job, crash, expected)
    _check_helpers(job)
    job.start(dataclasses.replace(forking, saves=2, recovers=True), None, linger=False)
    job.join()  # the agent leaves although helpers still run
    check_load(job, expected)
    check_end(job, expected.iteration + 2)
    check_storage(job.save)
    _check_helpers(job)


def _check_helpers(job: Job) -> None:
    """Fail if a helper has died, or holds memory or connections of the package."""
    helpers = helpers_in(job.home)
    if not helpers or not all(map(is_alive, helpers)):
        raise CellError(f"helpers {helpers} do not all live")
    for pid in helpers:
        if slabs_of(pid):
            raise CellError(f"helper {pid} keeps a slab")
        # Ranks use TCP among themselves; a Unix socket is the connection to the agent.
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]
        local = {f"socket:[{line.split()[6]}]" for line in lines}
        if local.intersection(sockets_of(pid)):
            raise CellError(f"helper {pid} keeps the connection to the agent")
