"""Cells of second starts of a job of real Megatron ranks, while its first start is at a step.

The first start is stopped in a save (or in the load of a restart). The second start resumes, and is
stopped when the same rank has staged its first save, before the "staged" message to the agent. Then
the first start continues to its end. Although it may still copy, the save of the second start is
committed as it was staged, and a third start restores it bit for bit. Contents differ by start.

`second_starts` covers the steps of the agent.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tests.support.trainer import is_alive
from tools.crash import trouble
from tools.crash.cells import LOADING, SAVING
from tools.crash.family import AnyCell, RestorePoint
from tools.crash.job import RANKS, CellError, Job, eventually, wake
from tools.crash.second_starts import HAPPENS
from tools.crash.start import RunPlan
from tools.crash.story import (
    TRAINERS,
    Crash,
    check_end,
    check_load,
    crash_job,
    stored_in,
)
from tools.crash.truth import check_storage, in_memory

_SAVES = 4
_REFUSED = r"process \d+ of the same rank on this node has replaced this process"


@dataclasses.dataclass(frozen=True)
class SecondJob(AnyCell):
    """The second start begins when `rank` of the first is at the `count`th hit of `point`."""

    rank: int
    point: str
    count: int
    source: str
    """Place where the third start finds the save of the second start."""

    in_buckets = True

    @property
    def place(self) -> tuple[tuple[str, str], str]:
        return (f"rank{self.rank}, two starts", self.point), HAPPENS

    def __str__(self) -> str:
        return f"second start: rank{self.rank}:{self.point}:{self.count}, then {self.source}"

    def run(self, home: Path) -> None:
        (home / "second").mkdir()
        first, second = Job(home), Job(home / "second")
        second.save, second.runtime_dir = first.save, first.runtime_dir
        try:
            _run_scenario(self, first, second)
        finally:
            second.kill_trainers()
            first.close()


def second_jobs() -> list[AnyCell]:
    """Return all cells; the stopped rank and the source of the third start alternate."""
    steps = [*((point, 3) for point in SAVING), ("save.told", 2), *((p, 1) for p in LOADING)]
    return [
        SecondJob(number % RANKS, *step, ("memory", "storage")[number // RANKS % 2])
        for number, step in enumerate(steps)
    ]


def _run_scenario(cell: SecondJob, first: Job, second: Job) -> None:
    trouble.begin(first.save)
    plan = RunPlan(save=str(first.save), seed=1, saves=_SAVES)
    before = RestorePoint()
    if cell.point.startswith("load."):
        first_crash = Crash("rank0", "save.told", 2, TRAINERS)
        first.start(plan, first_crash.fault, linger=True)
        before = crash_job(first, first_crash, before)
    who = f"rank{cell.rank}"
    first.start(plan, f"{who}:{cell.point}:{cell.count}", linger=True)
    stopped = first.stopped(who)
    with first.agent_at_rest():
        check_storage(first.save)
        memory = in_memory(first.agents, RANKS)
        expected = stored_in(first)
    if memory is not None and memory >= expected.iteration:
        expected = RestorePoint(memory, "memory")

    later = RunPlan(save=str(first.save), seed=2, loads=1, saves=1)
    second.start(later, f"{who}:stage.staged:1", linger=True)
    held = second.stopped(who)
    check_load(second, expected)
    wake(stopped)
    _check_refusal(first)
    wake(held)
    second.await_all("ended")
    newest = expected.iteration + 1
    for rank, events in enumerate(second.reports("reported")):
        if [(event["reported"], event["error"]) for event in events] != [(newest, None)]:
            raise CellError(f"rank {rank} of the second start reported {events}")
    first.kill_trainers()
    second.kill_trainers()
    if cell.source == "storage":
        first.kill_agents()
    check_storage(first.save)

    last = RunPlan(save=str(first.save), seed=3, loads=2, saves=2, recovers=True)
    second.start(last, None, linger=False)
    second.join()
    check_load(second, RestorePoint(newest, cell.source))
    check_end(second, newest + 2)


def _check_refusal(first: Job) -> None:
    """Wait until the first start has ended and logged that another process replaced it."""

    def is_over() -> bool:
        return all(first.reports("ended")) or not any(map(is_alive, first.trainers))

    eventually("the first start ends", is_over)
    if not re.search(_REFUSED, first.log()):
        raise CellError(f"the first start logged no refusal: {first.log()[-3000:]}")
