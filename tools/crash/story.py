"""One cell of the matrix: a job is killed at a failpoint, resumes, and is checked."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tools.crash import trouble
from tools.crash.family import AnyCell, RestorePoint
from tools.crash.job import RANKS, CellError, Job, wake
from tools.crash.start import RunPlan
from tools.crash.truth import await_tidy, check_left, check_storage, committed, in_memory

TRAINERS, AGENT, NODE = "trainers", "agent", "node"
KILLED = (TRAINERS, AGENT, NODE)


@dataclasses.dataclass(frozen=True)
class Crash:
    """A failpoint where a job is interrupted, and the processes that are killed."""

    who: str
    point: str
    count: int = 1
    killed: str = TRAINERS
    """`trainers`: all ranks, not the agent. `agent`: only the agent. `node`: all processes."""

    @property
    def fault(self) -> str:
        return f"{self.who}:{self.point}:{self.count}"

    def __str__(self) -> str:
        return f"{self.fault} kills {self.killed}"


@dataclasses.dataclass(frozen=True)
class Cell(AnyCell):
    """Successive crashes, each followed by a restart."""

    table = "one job"
    in_buckets = True

    crashes: tuple[Crash, ...]
    seed: int = 0
    saves: int = 4
    """Number of saves in a run that ends with a crash."""
    step: int = 1
    """Iterations between saves in the last run; above 1, the interrupted ones are not repeated."""
    hurried: bool = False
    broken: int = -1
    retain_interval: int | None = None

    def __str__(self) -> str:
        return ", then ".join(map(str, self.crashes)) + f", seed {self.seed}"

    @property
    def point(self) -> str:
        return self.crashes[-1].point

    @property
    def place(self) -> tuple[tuple[str, str], str]:
        if self.hurried:
            return ("any", f"{len(self.crashes)} crashes, one after the other"), "random"
        first, last = self.crashes[0], self.crashes[-1]
        where = last.point
        if last.point.startswith("load."):
            where += ", from memory" if first.killed == TRAINERS else ", from storage"
        elif self.broken >= 0:
            where += ", of a save that failed"
        return (last.who, where), f"{last.killed} killed"

    def run(self, home: Path) -> list[RestorePoint]:
        job = Job(home)
        try:
            return _run(self, job)
        finally:
            job.close()


def _run(cell: Cell, job: Job) -> list[RestorePoint]:
    """Run the jobs of a cell; return what each restart must restore."""
    trouble.begin(job.save)
    expected = RestorePoint()
    restored = []
    for number, crash in enumerate(cell.crashes):
        plan = RunPlan(
            save=str(job.save),
            seed=cell.seed,
            saves=cell.saves,
            hurried=cell.hurried,
            broken=-1 if number else cell.broken,
            retain_interval=cell.retain_interval,
        )
        job.start(plan, crash.fault, linger=True)
        expected = crash_job(job, crash, expected)
        restored.append(expected)
    plan = dataclasses.replace(
        plan, saves=2, step=cell.step, broken=-1, hurried=False, recovers=True
    )
    job.start(plan, None, linger=False)
    job.join()
    check_load(job, expected)
    check_end(job, expected.iteration + 2 * cell.step)
    return restored


def crash_job(job: Job, crash: Crash, expected: RestorePoint) -> RestorePoint:
    """Kill the processes of `crash` at its failpoint; return what the next run must restore."""
    stopped = job.stopped(crash.who)
    with job.agent_at_rest():
        check_storage(job.save)
    check_load(job, expected, all_ranks=False)
    if crash.killed == AGENT:
        job.kill_agents()
        wake(stopped)
        job.await_all("ended")
        check_load(job, expected)
    saved = [
        max((e["reported"] for e in rank if e["error"] is None), default=0)
        for rank in job.reports("reported")
    ]
    staged = [max((e["staged"] for e in rank), default=0) for rank in job.reports("staged")]
    before = expected.iteration
    if crash.killed == NODE:
        job.kill_trainers()
        job.kill_agents()
        check_storage(job.save)
        left = stored_in(job)
        least = max(*saved, before if expected.source == "storage" else 0)
    else:
        job.kill_trainers()
        with job.agent_at_rest():
            check_storage(job.save)
            memory = in_memory(job.agents, RANKS)
            left = stored_in(job)
        if memory is not None and memory >= left.iteration:
            left = RestorePoint(memory, "memory")
        least = max(*saved, min(staged), before)
        if crash.killed == TRAINERS:
            wake(stopped)
    if left.iteration < least:
        raise CellError(f"{left} is left, although iteration {least} was complete")
    return left


def stored_in(job: Job) -> RestorePoint:
    """Return the newest committed checkpoint."""
    iterations = committed(job.save)
    return RestorePoint(iterations[-1], "storage") if iterations else RestorePoint()


def check_load(job: Job, expected: RestorePoint, *, all_ranks: bool = True) -> None:
    """Fail unless the ranks loaded the expected checkpoint from the expected source, bit for bit.

    With `all_ranks` false, some ranks may not have loaded yet.
    """
    loaded = [event for events in job.reports("loaded") for event in events]
    for event in loaded:
        if event["loaded"] != expected.iteration or event["wrong"]:
            raise CellError(f"loaded {event}, expected {expected}: {job.log()[-3000:]}")
    if len(loaded) < RANKS:
        if all_ranks:
            raise CellError(f"a rank did not load: {job.log()[-3000:]}")
        return
    restored = re.findall(r"iteration (\d+) was restored from (\w+)", job.log())
    meant = [(str(expected.iteration), expected.source)] if expected.iteration else []
    if restored != meant:
        raise CellError(f"restored {restored}, expected {meant}")


def check_end(job: Job, newest: int) -> None:
    """Fail if a save of the last run failed, or if files are left over."""
    for events in job.reports("reported"):
        errors = [event["error"] for event in events if event["error"] is not None]
        if errors or len(events) != 2:
            raise CellError(f"the saves after the restart: {events}")
    check_storage(job.save)
    await_tidy(job.save, newest)
    check_left(job.runtime_dir)
