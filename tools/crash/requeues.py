"""Cells of requeues: a job is killed and starts on other nodes; later its first node returns.

A job of two ranks has two of three nodes, with real agents. Iteration 1 is committed. In the save
of iteration 2 the agent of one node is stopped at its step, and both trainers die. The job starts
again on the remaining node and a third node, with the ranks assigned according to `assigned`. It
resumes from the newest committed checkpoint and commits three more iterations. Then the stopped
agent continues; the job is killed and starts once more, on the node that is back. The bytes of each
run differ.

Steps of the agent of rank 1 that repeat steps of the agent of rank 0 are left out. Steps of agents
that hold copies are left out, because `peers` covers nodes that are lost and replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from pathlib import Path

import msgspec

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.config import Retention
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format.run_object import Ancestors
from megatron_flashckpt.load.offers import held_saves
from megatron_flashckpt.memory.slot import SlotState
from tests.agent.conftest import Node
from tests.support.stored import read_rank, stored, tracked
from tests.support.trainer import PATIENCE_S, FakeTrainer, is_alive
from tools.crash import trouble
from tools.crash.family import AnyCell, bytes_of, check_runs, run_of
from tools.crash.job import CellError, agent_at, eventually, wake
from tools.crash.peers import agent_fault
from tools.crash.rivals import COUNTS
from tools.crash.roots import root_of
from tools.crash.truth import await_tidy, check_left, check_storage, committed

HAPPENS = "requeued, then back"
RANKS = 2
#: Failpoints of the agent of rank 1, in its second save.
_OF_RANK_1 = {
    "agent.granted": (2,),
    "agent.enqueued": (2,),
    "persist.created": (2,),
    "persist.chunk": (2,),
    "persist.durable": (2,),
    "persist.record": (2,),
}
#: Failpoints of the agent of rank 0.
_OF_RANK_0 = {
    "agent.granted": (2,),
    "agent.enqueued": (2,),
    **COUNTS,
    "commit.records": (2,),
}
#: Longest wait of a start for the end of the previous run.
_AWAIT_S = 20.0
_FIRST = Retention(latest=1)
#: Retention of later runs: keeps or removes the iteration at which the first run was stopped.
_LATER = {"kept": Retention(latest=2), "moved": Retention(latest=10)}


@dataclasses.dataclass(frozen=True)
class Requeue(AnyCell):
    """The job is killed when the agent of `rank` is at the `count`th hit of `point`."""

    rank: int
    point: str
    count: int
    assigned: str
    """`kept`: the remaining node keeps its rank; `moved`: it gets the other rank."""

    in_buckets = True

    @property
    def place(self) -> tuple[tuple[str, str], str]:
        return (f"agent of rank {self.rank}, requeued", self.point), HAPPENS

    def __str__(self) -> str:
        return f"requeue: rank {self.rank}, agent:{self.point}:{self.count}, ranks {self.assigned}"

    def run(self, home: Path) -> None:
        nodes = [Node(home / name) for name in ("a", "b", "c")]
        try:
            _Scenario(self, home, nodes).run()
        finally:
            for node in nodes:
                node.close()


def requeues() -> list[AnyCell]:
    """Return all cells of requeues; the two assignments of ranks alternate."""
    steps = [
        (rank, point, count)
        for rank, points in enumerate((_OF_RANK_0, _OF_RANK_1))
        for point, counts in points.items()
        for count in counts
    ]
    return [Requeue(*step, ("kept", "moved")[number % 2]) for number, step in enumerate(steps)]


class _Scenario:
    """The scenario of one cell, step by step."""

    def __init__(self, cell: Requeue, home: Path, nodes: list[Node]) -> None:
        self._cell, self._nodes = cell, nodes
        self._root, self._reached = root_of(home), home / "reached"
        self._run = 0
        #: Trainers of this run, by rank.
        self._ranks: list[FakeTrainer] = []

    def run(self) -> None:
        cell = self._cell
        lost, stays, new = self._nodes
        places = [lost, stays] if cell.rank == 0 else [stays, lost]
        self._start(places, stopping=lost)
        self._open(None, ())
        self._save(1)
        trouble.begin(self._root)  # earlier errors would shift the hits that `cell.count` counts
        (agent,) = lost.agents()
        stopped = self._train_until_stopped(agent)
        self._kill()

        where = {lost: new, stays: stays}
        places = [where[node] for node in places]
        if cell.assigned == "moved":
            places.reverse()
        self._start(places)
        resumed = self._restore()
        if resumed < 1:
            raise CellError(f"the second run restored {resumed}")
        newest = resumed + 3
        for iteration in range(resumed + 1, newest + 1):
            self._save(iteration)
        wake(stopped)
        self._check_tracker(newest)
        check_storage(self._root)
        self._save(newest + 1)
        self._kill()

        # The first node is back with its rank; the node that replaced it is gone.
        places[cell.rank] = lost
        self._start(places)
        again = self._restore()
        if again != newest + 1:
            raise CellError(f"the third run restored {again}, not {newest + 1}")
        self._save(newest + 2)
        trouble.end(self._root)
        self._save(newest + 3)
        self._check_end(resumed, newest)

    def _check_end(self, resumed: int, newest: int) -> None:
        check_storage(self._root)
        self._await_tidy(newest + 3)
        check_runs(self._root, self._ranks, resumed, newest + 1)
        for trainer in self._ranks:
            agent = trainer.client.agent_pid
            trainer.hang_up(leave=True)
            eventually(f"agent {agent} leaves", lambda agent=agent: not is_alive(agent))  # type: ignore[misc]
        for node in self._nodes:
            if not node.agents():
                check_left(node.runtime_dir)

    def _await_tidy(self, newest: int) -> None:
        """Wait until no files are left over, with further saves if necessary.

        The node that is back ends its save of iteration 2 at any time, even after the last commit.
        """
        for _ in range(2):
            with contextlib.suppress(AssertionError):
                await_tidy(self._root, newest, within_s=5.0)
                return
            newest += 1
            self._save(newest)
        await_tidy(self._root, newest)

    # ------------------------------------------------------------------ a run

    def _start(self, places: list[Node], stopping: Node | None = None) -> None:
        """Start a rank on each of `places`."""
        self._run += 1
        fault = f"agent:{self._cell.point}:{self._cell.count}:STOP:{self._reached}"
        self._ranks = []
        for rank, node in enumerate(places):
            with agent_fault(fault if node is stopping else None):
                self._ranks.append(
                    node.trainer(
                        self._root,
                        rank,
                        RANKS,
                        config=node.config(answer_timeout_s=600.0),
                        retention=_FIRST if self._run == 1 else _LATER[self._cell.assigned],
                    )
                )

    def _open(self, save: Save | None, ancestors: Ancestors) -> None:
        """Open a run that resumes from `save`, and let all ranks join it."""
        # The stopped agent gives no sign of life; a start needs 12 s to notice that.
        policy, wait_s = ("take_over", 0.0) if self._run == 2 else ("refuse", _AWAIT_S)
        run = self._ranks[0].open_run(save, ancestors, policy, wait_s)  # type: ignore[arg-type]
        self._ranks[1].join(run)

    def _stage(self, trainer: FakeTrainer, iteration: int, save_id: str) -> None:
        slot = trainer.begin(iteration, save_id, PATIENCE_S)
        if slot is None:
            raise CellError(f"rank {trainer.rank}: no slot for iteration {iteration}")
        trainer.fill(slot, bytes_of(self._run, trainer, iteration))
        slot.set_state(SlotState.STAGED)
        trainer.client.staged(slot.index)

    def _save(self, iteration: int) -> None:
        for trainer in self._ranks:
            self._stage(trainer, iteration, trainer.new_save_id())
        for trainer in self._ranks:
            if error := trainer.outcome(60.0).error:
                raise CellError(f"rank {trainer.rank}: iteration {iteration}: {error}")

    def _train_until_stopped(self, agent: int) -> int:
        """Start the save of iteration 2; return the pid of the agent, stopped at its step.

        Return 0 if the agent does not hit its failpoint; see `agent_at`.
        """

        def stage(trainer: FakeTrainer) -> None:
            with contextlib.suppress(AgentError):  # the trainer is killed
                self._stage(trainer, 2, trainer.new_save_id())

        self._staging = [
            threading.Thread(target=stage, args=(trainer,), daemon=True) for trainer in self._ranks
        ]
        for thread in self._staging:
            thread.start()
        stopped = agent_at(self._cell.point, agent, self._root, 2)
        self._staging[1 - self._cell.rank].join()
        return stopped

    def _kill(self) -> None:
        """End the trainers of this run at any step, as SIGKILL does."""
        for trainer in self._ranks:
            trainer.client._sock.shutdown(socket.SHUT_RDWR)
        for thread in self._staging:
            thread.join()
        for trainer in self._ranks:
            trainer.hang_up()

    def _restore(self) -> int:
        """Restore the checkpoint that a load would restore; return its iteration.

        Raises:
            CellError: a rank restored another state than the state of the previous run.
        """
        offers = [
            [msgspec.structs.asdict(offer) for offer in trainer.take()] for trainer in self._ranks
        ]
        newest = committed(self._root)[-1]
        held = [s for s in held_saves(offers) if not s.missing and s.iteration >= newest]
        if held:
            iteration, save_id = held[0].iteration, held[0].save_id
            slots = [held[0].by_rank[trainer.rank]["slot"] for trainer in self._ranks]
            states = [t.bytes_in(slot) for t, slot in zip(self._ranks, slots, strict=True)]
            slab = self._ranks[0].slab
            assert slab is not None
            ancestors = slab.slots[slots[0]].meta.ancestors
        else:
            checkpoint = stored(self._root, newest)
            iteration, save_id = newest, checkpoint.manifest.save_id
            ancestors = checkpoint.manifest.ancestors
            states = [read_rank(checkpoint, trainer) for trainer in self._ranks]
        runs = {
            run_of(state, trainer, iteration)
            for state, trainer in zip(states, self._ranks, strict=True)
        }
        if runs != {self._run - 1}:
            raise CellError(f"run {self._run} restored the state of runs {runs}")
        self._open(Save(iteration, save_id), ancestors)
        return int(iteration)

    def _check_tracker(self, newest: int) -> None:
        if (said := tracked(self._root)) != str(newest):
            raise CellError(f"the tracker says {said}, not {newest}")
