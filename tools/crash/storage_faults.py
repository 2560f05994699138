"""Cells of a commit on faulty storage: an agent is killed at a step, and its successor commits.

Two nodes have a real agent and a rank each, on storage with faults (`tests.faulty_storage`). Every
agent process gets transient errors from the calls of a commit, or sees new names of the other agent
late. The committing agent is stopped at a step of its second save. Then it is killed, and its
successor commits; or both agents are killed, and the job starts again from storage. The faults
last until the end of the cell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import threading
from pathlib import Path

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.config import Retention
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format.file_names import TRACKER, save_name
from tests.agent.conftest import Node
from tests.faulty_storage.preload import FaultyStorage, fail, late
from tests.support.stored import read_rank, stored
from tests.support.trainer import FakeTrainer, content, end_agents
from tools.crash import trouble
from tools.crash.family import AnyCell
from tools.crash.job import CellError, agent_at
from tools.crash.peers import agent_fault
from tools.crash.truth import await_tidy, check_storage, committed

AGENT, BOTH = "agent killed", "both agents killed"
KILLED = (AGENT, BOTH)
#: Rules, by trouble. A rule with `times` is counted separately in each process.
PASSING = "errors that pass"
RULES = {
    PASSING: (
        fail("write", errno.ESTALE, "safetensors", times=1),
        fail("read", errno.ESTALE, ".record", times=1),
        fail("stat", errno.ETIMEDOUT, "safetensors", times=1),
        fail("fsync", errno.EIO, "common", times=1),
        fail("link", errno.ENOTCONN, ".end", times=1),
        fail("rename", errno.ETIMEDOUT, TRACKER, times=1, done=True),
    ),
    "names that come late": (late(150),),
}
#: Hits that lie in the save of iteration 2, by failpoint.
_COUNTS = {
    "persist.durable": (2,),
    "persist.record": (2,),
    "commit.ready": (2,),
    "commit.common": (2,),
    "commit.end": (2,),
    "commit.tracker": (2,),
    "commit.tracked": (2,),
    "commit.records": (2,),
    "commit.tidy": (2,),
    "retain.chosen": (1,),
    "save.marked": (2,),
}
_RETENTION = Retention(latest=1)
#: Longest wait for the result of a save.
_OUTCOME_S = 60.0


@dataclasses.dataclass(frozen=True)
class FaultyCell(AnyCell):
    """The committing agent is stopped at the `count`th hit of `point`."""

    trouble: str
    point: str
    count: int
    killed: str

    @property
    def place(self) -> tuple[tuple[str, str], str]:
        return (f"agent, {self.trouble}", self.point), self.killed

    def __str__(self) -> str:
        return f"{self.trouble}: agent:{self.point}:{self.count}, {self.killed}"

    def run(self, home: Path) -> None:
        scenario = _Scenario(self, home)
        try:
            scenario.begin()
            if self.killed == AGENT:
                scenario.succeed()
            else:
                scenario.restart()
            scenario.end()
        finally:
            scenario.close()


def faulty_cells() -> list[FaultyCell]:
    """Return all cells on faulty storage."""

    def is_thorough(trouble: str, point: str) -> bool:
        """Return whether to kill in both ways; the other steps alternate, to save time."""
        return trouble == PASSING and point.startswith("commit.")

    steps = [(point, count) for point, counts in _COUNTS.items() for count in counts]
    return [
        FaultyCell(trouble, point, count, killed)
        for trouble in RULES
        for number, (point, count) in enumerate(steps)
        for killed in (KILLED if is_thorough(trouble, point) else [KILLED[number % 2]])
    ]


class _Scenario:
    """The scenario of one cell, step by step."""

    def __init__(self, cell: FaultyCell, home: Path) -> None:
        self._cell = cell
        self._root, self._reached = home / "save", home / "reached"
        self._nodes = [Node(home / "a"), Node(home / "b")]
        self._faulty = FaultyStorage(self._root, home)
        self._trainers: list[FakeTrainer] = []
        self._staging: threading.Thread | None = None

    def _start(self, fault: str | None = None) -> None:
        """Start both ranks and their agents; the first agent gets `fault`."""
        self._trainers = []
        for rank, node in enumerate(self._nodes):
            with agent_fault(None if rank else fault), self._faulty.under_agents():
                made = node.trainer(
                    self._root,
                    rank,
                    2,
                    # Trainers must keep waiting for the answer of the stopped first agent.
                    config=node.config(answer_timeout_s=600.0),
                    retention=_RETENTION,
                    numel=4000,
                )
            self._trainers.append(made)

    def begin(self) -> None:
        """Commit iteration 1; return when the first agent is stopped in the save of iteration 2."""
        cell = self._cell
        self._start(f"agent:{cell.point}:{cell.count}:STOP:{self._reached}")
        self._open(None)
        self._save(1)
        # At most 1: with the errors of these rules, a shard gets as many as the agent tolerates.
        self._faulty.rule(*RULES[cell.trouble], *trouble.errors(self._root, most=1, within_s=60))
        # In a thread, because the agent may stop before it answers.
        self._staging = threading.Thread(target=self._stage_at_last)
        self._staging.start()
        self._trainers[1].stage(2, self._save_id(2))
        (agent,) = self._nodes[0].agents()
        agent_at(cell.point, agent, self._root, 2)
        check_storage(self._root)

    def _stage_at_last(self) -> None:
        with contextlib.suppress(AgentError):
            self._trainers[0].stage(2, self._save_id(2))

    def succeed(self) -> None:
        """Kill the first agent; its successor must commit iteration 2."""
        end_agents(self._nodes[0].runtime_dir)
        self._join()
        with agent_fault(None), self._faulty.under_agents():
            taken = self._trainers[0].reconnect()
        outcomes = [self._trainers[1].outcome(_OUTCOME_S)]
        if self._save_id(2) in taken:
            outcomes.append(self._trainers[0].outcome(_OUTCOME_S))
        if errors := [outcome.error for outcome in outcomes if outcome.error is not None]:
            raise CellError(f"the successor did not commit: {errors}")
        self._check(2)

    def restart(self) -> None:
        """Kill both agents; committed checkpoints must be complete."""
        for node in self._nodes:
            end_agents(node.runtime_dir)
        self._join()
        check_storage(self._root)
        if not committed(self._root):
            raise CellError("no checkpoint is left, although iteration 1 was committed")
        for trainer in self._trainers:
            trainer.hang_up()
        self._start()
        newest = committed(self._root)[-1]
        self._open(Save(newest, stored(self._root, newest).manifest.save_id))

    def end(self) -> None:
        """Save twice more with the same faults; no file of the interrupted save may be left."""
        for iteration in (3, 4):
            if iteration == 4 and trouble.is_on_faulty_storage(self._root):
                self._faulty.rule(*RULES[self._cell.trouble])
            self._save(iteration)
            self._check(iteration)
        if self._cell.trouble == PASSING and not self._faulty.hits():
            raise CellError("no process got an error")
        await_tidy(self._root, 4)

    def _save(self, iteration: int) -> None:
        for trainer in self._trainers:
            trainer.stage(iteration, self._save_id(iteration))
        errors = [trainer.outcome(_OUTCOME_S).error for trainer in self._trainers]
        if any(errors):
            raise CellError(f"iteration {iteration}: {errors}")

    def _check(self, iteration: int) -> None:
        check_storage(self._root)
        if (tracked := (self._root / TRACKER).read_text()) != str(iteration):
            raise CellError(f"the tracker says {tracked}, not {iteration}")
        for trainer in self._trainers:
            expected = content(trainer.rank, iteration, trainer.layout.nbytes)
            if read_rank(stored(self._root, iteration), trainer) != expected:
                raise CellError(f"rank {trainer.rank}: iteration {iteration} has other bytes")

    def close(self) -> None:
        for node in self._nodes:
            node.close()
        self._join()

    def _join(self) -> None:
        if self._staging is not None:
            self._staging.join()

    def _open(self, save: Save | None) -> None:
        """Open a run that resumes from `save`, and let all ranks join it."""
        run = self._trainers[0].open_run(save, policy="take_over")
        self._trainers[1].join(run)

    def _save_id(self, iteration: int) -> str:
        run = self._trainers[0].run
        assert run is not None
        return save_name(run.name, iteration)
