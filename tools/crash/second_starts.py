"""Cells of second starts: a rank is started again while its first process saves.

These cells cover the steps of the agent. The ranks have no Megatron: the first trainer runs in the
process of the matrix, later ones are forked. When the agent is stopped at its step, iteration 1 is
committed, iteration 2 is staged, and half of iteration 3 is copied. The second trainer connects,
the agent continues, and the second trainer stages its own iteration 3. Then the first trainer
copies the rest of its iteration 3.

`second_jobs` covers the steps of trainers, with Megatron's ranks. Steps of agents that hold copies
for each other are left out, because the agent has chosen the process that it serves before them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from pathlib import Path
from typing import NamedTuple

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.config import Retention
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format.file_names import common_name, iteration_dir, save_name
from megatron_flashckpt.memory.slot import Slot, SlotState
from tests.agent.conftest import Node
from tests.support.stored import read_rank
from tests.support.trainer import PATIENCE_S, FakeTrainer, config_of
from tools.crash import trouble
from tools.crash.family import AnyCell, bytes_of, check_runs, run_of
from tools.crash.job import CellError, agent_at, eventually, wake
from tools.crash.later import LaterProcess
from tools.crash.peers import agent_fault
from tools.crash.rivals import COUNTS, FAILING
from tools.crash.truth import check_left, check_storage, check_tidy, committed, stored_patiently

HAPPENS = "started a second time"
#: Hits of failpoints before a commit.
_BEFORE = {"agent.attached": (1,), "agent.granted": (2, 3), "agent.enqueued": (2,)}
#: Retention of the first process (see `rivals.COUNTS`), and of later ones, which keep all saves.
_FIRST, _LATER = Retention(latest=1), Retention(latest=4)


class RestoredCheckpoint(NamedTuple):
    """The checkpoint that a process restored at its start."""

    iteration: int
    source: str
    run: int
    """Number of the run that saved this state; 0: nothing was restored."""


class RankRun:
    """One run of the only rank of a job."""

    def __init__(self, root: Path, runtime_dir: Path, number: int) -> None:
        self.number = number
        self._root = root
        self._half: tuple[Slot, int] | None = None
        config = config_of(runtime_dir, answer_timeout_s=600.0, environment=trouble.VARIABLES)
        retention = _FIRST if number == 1 else _LATER
        self.trainer = FakeTrainer(root, config, retention=retention)

    def start(self) -> RestoredCheckpoint:
        """Restore the newest checkpoint and open a run, as a load does."""
        trainer = self.trainer
        offers = trainer.take()
        newest = max(offers, key=lambda offer: offer.iteration, default=None)
        done = max(committed(self._root), default=0)
        restored, save, ancestors = RestoredCheckpoint(0, "nothing", 0), None, ()
        if newest is not None and newest.iteration >= done:
            iteration, save = newest.iteration, Save(newest.iteration, newest.save_id)
            ancestors = trainer.slab.slots[newest.slot].meta.ancestors
            data = trainer.bytes_in(newest.slot)
            restored = RestoredCheckpoint(iteration, "memory", run_of(data, trainer, iteration))
        elif done:
            checkpoint = stored_patiently(self._root, done)
            save = Save(done, checkpoint.manifest.save_id)
            ancestors = checkpoint.manifest.ancestors
            data = read_rank(checkpoint, trainer)
            restored = RestoredCheckpoint(done, "storage", run_of(data, trainer, done))
        if trainer.slab is not None and trainer.slab.read_only:
            trainer.slab.close()  # like `NodeLink`, which saves into a new slab
            trainer.slab = None
        trainer.open_run(save, ancestors, wait_s=PATIENCE_S)
        return restored

    def begin(self, iteration: int) -> None:
        """Copy the first half of a checkpoint."""
        slot = self.trainer.begin(iteration, self.trainer.new_save_id(), PATIENCE_S)
        if slot is None:
            raise CellError(f"no slot for iteration {iteration}")
        self._half = slot, iteration
        half = self.trainer.layout.nbytes // 2
        self._copy(slice(0, half))

    def copy_rest(self) -> Slot | None:
        """Copy the second half of the checkpoint of `begin`; return its slot."""
        if self._half is None:
            return None
        self._copy(slice(self.trainer.layout.nbytes // 2, self.trainer.layout.nbytes))
        return self._half[0]

    def _copy(self, part: slice) -> None:
        """Write to the granted place of the slot, without a check, as a copy thread does."""
        assert self._half is not None
        assert self.trainer.slab is not None
        slot, iteration = self._half
        data = bytes_of(self.number, self.trainer, iteration)[part]
        start = slot.data_offset + part.start
        self.trainer.slab.memory[start : start + len(data)] = data

    def stage(self, iteration: int) -> Slot:
        """Copy a checkpoint, without a "staged" message to the agent."""
        self.begin(iteration)
        slot = self.copy_rest()
        assert slot is not None
        slot.set_state(SlotState.STAGED)
        return slot

    def send_staged(self, slot: Slot | None = None) -> None:
        """Send the "staged" message for a slot; by default for the slot of the last `begin`."""
        assert self._half is not None
        self.trainer.client.staged((slot or self._half[0]).index)

    def outcome(self, iteration: int) -> None:
        """Wait until a save is durable."""
        outcome = self.trainer.outcome(60.0)
        if outcome.error is not None or outcome.iteration != iteration:
            raise CellError(f"iteration {iteration}: {outcome}")

    def save(self, iteration: int) -> None:
        self.send_staged(self.stage(iteration))
        self.outcome(iteration)

    def stage_without_message(self, iteration: int) -> None:
        """Copy a checkpoint whose "staged" message is sent later."""
        self.stage(iteration)

    def leave(self) -> None:
        self.trainer.hang_up(leave=True)


@dataclasses.dataclass(frozen=True)
class SecondStart(AnyCell):
    """The second process starts when the agent is at the `count`th hit of `point`."""

    point: str
    count: int
    fails: bool = False
    """The common state of iteration 2 cannot be stored."""

    @property
    def place(self) -> tuple[tuple[str, str], str]:
        return ("agent, two runs of a rank", self.point), HAPPENS

    def __str__(self) -> str:
        return f"second start: agent:{self.point}:{self.count}, {HAPPENS}"

    @property
    def least(self) -> int:
        """The newest iteration that the first process has certainly staged."""
        return {"agent.attached": 0, "agent.granted": self.count - 1}.get(self.point, 2)

    def run(self, home: Path) -> None:
        root, node = home / "save", Node(home / "run")
        later: list[LaterProcess] = []
        try:
            with agent_fault(f"agent:{self.point}:{self.count}:STOP:{home / 'reached'}"):
                first = RankRun(root, node.runtime_dir, 1)
            try:
                _Scenario(self, home, root, node, first, later).run()
            finally:
                for process in later:
                    process.kill()
                first.trainer.hang_up()
        finally:
            node.close()


def second_starts() -> list[AnyCell]:
    """Return all cells of second starts at the agent's steps."""
    return [
        SecondStart(point, count, fails)
        for points, fails in ((_BEFORE, False), (COUNTS, False), (FAILING, True))
        for point, counts in points.items()
        for count in counts
    ]


class _Scenario:
    """The scenario of one cell, step by step."""

    def __init__(
        self,
        cell: SecondStart,
        home: Path,
        root: Path,
        node: Node,
        first: RankRun,
        later: list[LaterProcess],
    ) -> None:
        self._cell, self._home, self._root, self._node = cell, home, root, node
        self._first, self._later = first, later

    def run(self) -> None:
        first = self._first
        (agent,) = self._node.agents()
        run = first.trainer.open_run()
        name = common_name(save_name(run.name, 2))
        self._blocking = self._root / iteration_dir(2) / name
        training = threading.Thread(target=self._train, daemon=True)
        training.start()
        stopped = agent_at(self._cell.point, agent, self._root, 2)
        if self._cell.fails:
            with contextlib.suppress(FileNotFoundError):
                self._blocking.rmdir()
        # An agent that runs serves the second process at once, and hangs up on the first one.
        second = self._start(2, connections=2 if stopped else 0)
        wake(stopped)
        resumed = second.answer()
        if resumed.iteration < self._cell.least or resumed.run not in (0, 1):
            raise CellError(f"the second process restored {resumed}")
        # The first process must copy its rest into none of the slots granted to the second process.
        second.do("stage_without_message", resumed.iteration + 1)
        training.join()
        first.copy_rest()
        second.do("send_staged")
        second.do("outcome", resumed.iteration + 1)
        self._check_refusal(second.pid)
        second.do("save", resumed.iteration + 2)
        check_storage(self._root)
        second.kill()

        newest = resumed.iteration + 2
        third = self._start(3)
        restored = third.answer()
        if restored != RestoredCheckpoint(newest, "memory", 2):
            raise CellError(f"the third process restored {restored}")
        trouble.end(self._root)
        third.do("save", newest + 1)
        third.do("leave")
        eventually(f"agent {agent} leaves", lambda: not self._node.agents())
        check_storage(self._root)
        check_tidy(self._root, newest + 1)
        check_left(self._node.runtime_dir)
        check_runs(self._root, [first.trainer], resumed.iteration, newest)

    def _train(self) -> None:
        """Save with the first process until the agent closes its connection."""
        first = self._first
        # Failed saves are ignored as well.
        with contextlib.suppress(AgentError, AssertionError):
            first.save(1)
            trouble.begin(self._root)  # earlier errors would shift the hits of `cell.count`
            if self._cell.fails:
                self._blocking.mkdir(parents=True)
            slot = first.stage(2)
            first.begin(3)
            first.send_staged(slot)
            first.outcome(2)

    def _start(self, number: int, connections: int = 0) -> LaterProcess:
        """Start a later process, and wait until the agent has `connections` (or pending ones)."""
        process = LaterProcess(self._home, self._root, self._node.runtime_dir, number)
        self._later.append(process)
        process.ask("start")
        path = str(self._node.place(self._root))

        def connected() -> bool:
            lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
            # The listening socket counts as one more.
            return sum(line.endswith(path) for line in lines) > connections

        if connections:
            eventually("the second process connects", connected)
        return process

    def _check_refusal(self, served: int) -> None:
        try:
            self._first.trainer.find_agent()
        except AgentError as error:
            if f"process {served} of the same rank" in str(error) and "end it" in str(error):
                return
            raise CellError(f"the first process got: {error}") from error
        raise CellError("the first process is served")
