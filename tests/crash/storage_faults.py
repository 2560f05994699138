"""Cells of a commit on storage in trouble: an agent is killed at a step, and the next one finishes.

Two nodes with a real agent and a rank each, on storage with faults (`tests.faulty_storage`): every
agent process meets errors that pass at the calls of a commit, or sees the other's new names late.
The agent that commits is stopped at a step of its second save. Then it is killed, and its
successor finishes; or both agents are killed, and the job starts again from storage. The trouble
lasts to the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import threading
from pathlib import Path

from megatron_flashckpt.config import Retention
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format.file_names import TRACKER
from tests.agent.conftest import Node
from tests.agent.test_shard_writer import read_rank, stored
from tests.crash import trouble
from tests.crash.family import FamilyCell
from tests.crash.job import CellError, agent_at, eventually
from tests.crash.peers import agent_fault
from tests.crash.truth import await_tidy, check_storage, committed
from tests.faulty_storage.preload import FaultyStorage, fail, late
from tests.support.trainer import FakeTrainer, content, is_alive

AGENT, BOTH = "agent killed", "both agents killed"
KILLED = (AGENT, BOTH)
#: By trouble: the rules. Each rule with `times` counts in each process.
PASSING = "errors that pass"
RULES = {
    PASSING: (
        fail("write", errno.ESTALE, "safetensors", times=1),
        fail("read", errno.ESTALE, ".commit", times=1),
        fail("stat", errno.ETIMEDOUT, "safetensors", times=1),
        fail("fsync", errno.EIO, "common", times=1),
        fail("rename", errno.ENOTCONN, "manifest.json", times=1),
        fail("rename", errno.ETIMEDOUT, TRACKER, times=1, done=True),
    ),
    "names that come late": (late(150),),
}
#: By point: at which counts it lies in the save of iteration 2. The puts: the record, the common
#: state, the manifest, the marker, the tracker, the history. Leftovers: the records of both ranks.
_COUNTS = {
    "persist.durable": (2,),
    "put.written": (7, 8, 9, 10, 11),
    "put.renamed": (7, 8, 9, 10, 11),
    "commit.common": (2,),
    "commit.manifest": (2,),
    "commit.tracker": (2,),
    "leftover.file": (3,),
    "commit.tidy": (2,),
    "retain.chosen": (1,),
    "save.marked": (2,),
}
_RETENTION = Retention(latest=1)
#: Longest wait for an outcome.
_OUTCOME_S = 60.0


@dataclasses.dataclass(frozen=True)
class FaultyCell(FamilyCell):
    """The agent that commits comes to `point` for the `count`th time."""

    trouble: str
    point: str
    count: int
    killed: str

    @property
    def place(self) -> tuple[tuple[str, str], str]:
        """The row, and the column."""
        return (f"agent, {self.trouble}", self.point), self.killed

    def __str__(self) -> str:
        return f"{self.trouble}: agent:{self.point}:{self.count}, {self.killed}"

    def tell(self, home: Path) -> None:
        """Let the cell happen in the empty directory `home`.

        Raises:
            CellError: something is lost, half or left behind.
        """
        story = _Story(self, home)
        try:
            story.begin()
            if self.killed == AGENT:
                story.succeed()
            else:
                story.restart()
            story.end()
        finally:
            story.close()


def faulty_cells() -> list[FaultyCell]:
    """Return all cells on storage in trouble."""

    def is_thorough(trouble: str, point: str) -> bool:
        """Return whether to kill in both ways; the matrix as a whole takes long enough."""
        return trouble == PASSING and not point.startswith("put.")

    steps = [(point, count) for point, counts in _COUNTS.items() for count in counts]
    return [
        FaultyCell(trouble, point, count, killed)
        for trouble in RULES
        for number, (point, count) in enumerate(steps)
        for killed in (KILLED if is_thorough(trouble, point) else [KILLED[number % 2]])
    ]


def faulty_sample() -> list[FaultyCell]:
    """Return cells that stand for all of them in the test suite."""
    passing, late_names = RULES
    return [
        FaultyCell(passing, "commit.common", 2, AGENT),
        FaultyCell(passing, "put.written", 9, BOTH),
        FaultyCell(late_names, "put.renamed", 8, BOTH),
        FaultyCell(late_names, "commit.manifest", 2, AGENT),
    ]


class _Story:
    def __init__(self, cell: FaultyCell, home: Path) -> None:
        self._cell = cell
        self._root, self._reached = home / "save", home / "reached"
        self._nodes = [Node(home / "a"), Node(home / "b")]
        self._faulty = FaultyStorage(self._root, home)
        self._trainers: list[FakeTrainer] = []
        self._staging: threading.Thread | None = None

    def _start(self, fault: str | None = None) -> None:
        """Start both ranks, and with them their agents; the first one comes to `fault`."""
        self._trainers = []
        for rank, node in enumerate(self._nodes):
            with agent_fault(None if rank else fault), self._faulty.under_agents():
                made = node.trainer(
                    self._root,
                    rank,
                    2,
                    # The first agent stands still for a while, and must not be given up for that.
                    config=node.config(answer_timeout_s=600.0),
                    retention=_RETENTION,
                    numel=4000,
                )
            self._trainers.append(made)

    def begin(self) -> None:
        """Commit iteration 1, and let the first agent stop in the save of iteration 2."""
        cell = self._cell
        self._start(f"agent:{cell.point}:{cell.count}:STOP:{self._reached}")
        self._save(1)
        # One: with those of these rules a shard meets as many as the agent bears.
        self._faulty.rule(*RULES[cell.trouble], *trouble.errors(self._root, most=1, within_s=60))
        # Nobody knows whether the agent still answers before it stops.
        self._staging = threading.Thread(target=self._stage_at_last)
        self._staging.start()
        self._trainers[1].stage(2, _save_id(2))
        (agent,) = self._nodes[0].agents()
        agent_at(cell.point, agent, self._root, 2)
        check_storage(self._root)

    def _stage_at_last(self) -> None:
        with contextlib.suppress(AgentError):
            self._trainers[0].stage(2, _save_id(2))

    def succeed(self) -> None:
        """Let another agent finish what the killed one has begun."""
        self._kill(self._nodes[0])
        self._join()
        with agent_fault(None), self._faulty.under_agents():
            taken = self._trainers[0].reconnect()
        told = [self._trainers[1].outcome(_OUTCOME_S)]
        if _save_id(2) in taken:
            told.append(self._trainers[0].outcome(_OUTCOME_S))
        if errors := [outcome.error for outcome in told if outcome.error is not None]:
            raise CellError(f"the successor has not committed: {errors}")
        self._check(2)

    def restart(self) -> None:
        """Lose all memory; what is committed is whole."""
        for node in self._nodes:
            self._kill(node)
        self._join()
        check_storage(self._root)
        if not committed(self._root):
            raise CellError("no checkpoint is left, though iteration 1 was committed")
        for trainer in self._trainers:
            trainer.hang_up()
        self._start()

    def end(self) -> None:
        """Save twice more, in the same trouble; nothing may stay of what was cut short."""
        for iteration in (3, 4):
            if iteration == 4 and trouble.is_troubled(self._root):
                self._faulty.rule(*RULES[self._cell.trouble])
            self._save(iteration)
            self._check(iteration)
        if self._cell.trouble == PASSING and not self._faulty.hits():
            raise CellError("no error was come to")
        await_tidy(self._root, 4)

    def _save(self, iteration: int) -> None:
        for trainer in self._trainers:
            trainer.stage(iteration, _save_id(iteration))
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

    @staticmethod
    def _kill(node: Node) -> None:
        for pid in node.agents():
            os.kill(pid, signal.SIGKILL)
            eventually(f"the end of agent {pid}", lambda pid=pid: not is_alive(pid))  # type: ignore[misc]

    def close(self) -> None:
        for node in self._nodes:
            node.close()
        self._join()

    def _join(self) -> None:
        if self._staging is not None:
            self._staging.join()


def _save_id(iteration: int) -> str:
    return f"{iteration:012x}"
