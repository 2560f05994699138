"""One cell of the matrix: a job is killed at a point and goes on, and what must be true then."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tests.crash import trouble
from tests.crash.job import RANKS, CellError, Job, wake
from tests.crash.start import Life
from tests.crash.truth import await_tidy, check_left, check_storage, committed, in_memory

TRAINERS, AGENT, NODE = "trainers", "agent", "node"
KILLED = (TRAINERS, AGENT, NODE)


@dataclasses.dataclass(frozen=True)
class Crash:
    """Where a job comes to its end, and how."""

    who: str
    point: str
    count: int = 1
    killed: str = TRAINERS
    """`trainers`: all ranks; the agent goes on. `agent`: it alone. `node`: everything."""

    @property
    def fault(self) -> str:
        return f"{self.who}:{self.point}:{self.count}"

    def __str__(self) -> str:
        return f"{self.fault} kills {self.killed}"


@dataclasses.dataclass(frozen=True)
class Cell:
    """Crashes, one after the other, each followed by a restart."""

    crashes: tuple[Crash, ...]
    seed: int = 0
    saves: int = 4
    """In a life that ends with a crash."""
    step: int = 1
    """Between saves in the last life; more than 1 leaves out what a crash cut short."""
    hurried: bool = False
    broken: int = -1
    retain_interval: int | None = None

    def __str__(self) -> str:
        return ", then ".join(map(str, self.crashes)) + f", seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Found:
    """What a start finds, or must find: nothing at first."""

    iteration: int = 0
    source: str = "nothing"


def tell(cell: Cell, home: Path) -> list[Found]:
    """Let `cell` happen in the empty directory `home`; return what was restored in it.

    Raises:
        CellError: something is not as it should be.
    """
    job = Job(home)
    trouble.begin(job.save)
    expected = Found()
    restored = []
    try:
        for number, crash in enumerate(cell.crashes):
            life = Life(
                save=str(job.save),
                seed=cell.seed,
                saves=cell.saves,
                hurried=cell.hurried,
                broken=-1 if number else cell.broken,
                retain_interval=cell.retain_interval,
            )
            job.start(life, crash.fault, linger=True)
            expected = crash_job(job, crash, expected)
            restored.append(expected)
        life = dataclasses.replace(
            life, saves=2, step=cell.step, broken=-1, hurried=False, recovers=True
        )
        job.start(life, None, linger=False)
        job.join()
        check_load(job, expected)
        check_end(job, expected.iteration + 2 * cell.step)
        return restored
    finally:
        job.close()


def crash_job(job: Job, crash: Crash, expected: Found) -> Found:
    """Kill what the crash kills, at its point; return what the next life must find."""
    there = job.stopped(crash.who)
    with job.agent_at_rest():
        check_storage(job.save)
    check_load(job, expected, all_ranks=False)
    if crash.killed == AGENT:
        job.kill_agents()
        wake(there)
        job.everyone("ended")
        check_load(job, expected)
    told = [
        max((e["told"] for e in rank if e["error"] is None), default=0)
        for rank in job.reports("told")
    ]
    staged = [max((e["staged"] for e in rank), default=0) for rank in job.reports("staged")]
    before = expected.iteration
    if crash.killed == NODE:
        job.kill_trainers()
        job.kill_agents()
        check_storage(job.save)
        found = stored_in(job)
        least = max(*told, before if expected.source == "storage" else 0)
    else:
        job.kill_trainers()
        with job.agent_at_rest():
            check_storage(job.save)
            memory = in_memory(job.agents, RANKS)
            found = stored_in(job)
        if memory is not None and memory >= found.iteration:
            found = Found(memory, "memory")
        least = max(*told, min(staged), before)
        if crash.killed == TRAINERS:
            wake(there)
    if found.iteration < least:
        raise CellError(f"{found} is left, though iteration {least} was there")
    return found


def stored_in(job: Job) -> Found:
    found = committed(job.save)
    return Found(found[-1], "storage") if found else Found()


def check_load(job: Job, expected: Found, *, all_ranks: bool = True) -> None:
    """Refuse another checkpoint than the newest, from elsewhere, or not bit for bit.

    Without `all_ranks`, some may not have come so far.
    """
    loaded = [event for events in job.reports("loaded") for event in events]
    for event in loaded:
        if event["loaded"] != expected.iteration or event["wrong"]:
            raise CellError(f"loaded {event}, expected {expected}: {job.log()[-3000:]}")
    if len(loaded) < RANKS:
        if all_ranks:
            raise CellError(f"a rank has not loaded: {job.log()[-3000:]}")
        return
    said = re.findall(r"iteration (\d+) was restored from (\w+)", job.log())
    meant = [(str(expected.iteration), expected.source)] if expected.iteration else []
    if said != meant:
        raise CellError(f"restored {said}, expected {meant}")


def check_end(job: Job, newest: int) -> None:
    """Refuse a last life in which something was not saved, and whatever is left behind."""
    for events in job.reports("told"):
        errors = [event["error"] for event in events if event["error"] is not None]
        if errors or len(events) != 2:
            raise CellError(f"the saves after the restart: {events}")
    check_storage(job.save)
    await_tidy(job.save, newest)
    check_left(job.runtime_dir)
