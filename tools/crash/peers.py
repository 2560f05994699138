"""Cells of nodes that hold copies (or parity) for each other: an agent is stopped, a node is lost.

The agents are real and have a runtime directory each; the trainers have no Megatron and run in this
process. Iteration 1 is committed and held by other nodes. Iterations 2 and 3 are for memory only,
so a rank can get them back only from a holder, and not from storage. Node 0's agent is stopped
while iteration 3 is sent, or while it is sent back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from megatron_flashckpt.agent.peers.topology import Topology
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.failpoints import VARIABLE
from megatron_flashckpt.load.offers import held_saves, missing_ranks, newest_saves
from megatron_flashckpt.memory.slot import SlotState
from tests.support.cluster import Cluster, cluster
from tests.support.stored import read_rank, stored
from tests.support.trainer import content, is_alive, new_save_id, run_after
from tools.crash import trouble
from tools.crash.family import AnyCell, RestorePoint
from tools.crash.job import CellError, eventually, state_of, wake
from tools.crash.truth import await_tidy, check_left, check_storage, committed

#: The node or agent that is lost when node 0's agent is stopped at its failpoint.
OWN, NEXT, AGENT, ALL = "its node", "the next node", "the agent, then the next node", "all nodes"
LOST = (OWN, NEXT, AGENT, ALL)
#: Number of nodes by scheme; each node has one rank.
NODES = {"copy": 2, "xor": 3}
_SENDING = ("send.labelled", "send.begun", "send.chunk", "send.ended")
_HOLDING = ("hold.begun", "hold.chunk", "hold.ended")
_RECOVERING = ("recover.asked", "recover.filled", "recover.installed")
#: Elements of a checkpoint: three chunks of 4 MiB; half of it has two.
_NUMEL = 1_600_000
_GROUP = 3
_SLOTS = 2
_CHUNKS = {"copy": 3, "xor": 2}
#: Log line of a holder that requests parts again.
REQUESTED_AGAIN = re.compile(r"iteration 3: ranks \{(.*)\} are to send")
#: Longest wait for the answer of a lost agent.
_PEER_TIMEOUT_S = 2.0
#: Held while an agent starts: its fault is in the environment, which all threads share.
_starting = threading.Lock()


@dataclasses.dataclass(frozen=True)
class PeerCell(AnyCell):
    """Node 0's agent is stopped at `point`; failpoints of a recovery are hit by its replacement."""

    table = "nodes"
    scheme: str
    point: str
    count: int
    lost: str

    @property
    def may_find(self) -> set[int]:
        """The iterations from which the last start may resume."""
        is_sender = self.point in _SENDING
        if self.lost == ALL or self.point == "hold.read":
            return {1}
        if self.lost == AGENT or self.point in _RECOVERING:
            return {3}
        if self.lost == OWN:
            # Holders have the other ranks' slots; the last holder completes the slot of rank 0.
            if not is_sender:
                return {3}
            if self.point != "send.ended":
                return {2}
            return {3} if self.scheme == "copy" else {2, 3}
        # The agent continues. A recovery from parity also needs its own part, and the part that it
        # was receiving; the chunks sent before may have arrived.
        if self.scheme == "xor" or self.point == "hold.chunk":
            return {2, 3}
        return {2} if self.point == "hold.begun" else {3}

    @property
    def place(self) -> tuple[tuple[str, str], str]:
        return (f"agent, {self.scheme}", self.point), f"{self.lost} lost"

    def run(self, home: Path) -> list[RestorePoint]:
        with cluster(home, [1] * NODES[self.scheme], numel=_NUMEL) as made:
            scenario = _Scenario(self, made, home / "reached")
            scenario.begin()
            scenario.crash()
            restored = scenario.restore()
            if restored.iteration not in self.may_find:
                raise CellError(f"{restored} was restored, expected one of {self.may_find}")
            scenario.end(restored.iteration)
            return [restored]

    def __str__(self) -> str:
        return f"{self.scheme}: agent:{self.point}:{self.count}, {self.lost} lost"


def peer_cells() -> list[PeerCell]:
    """Return all cells of nodes that hold copies for each other."""
    made = []
    for scheme, nodes in NODES.items():
        for point in (*_SENDING, *_HOLDING):
            # The agent hits the failpoint `hits` times per save; it is stopped in the third save.
            hits = 1 if point == "send.labelled" else nodes - 1
            if point.endswith("chunk"):
                hits *= _CHUNKS[scheme]
            for nth in sorted({1, hits}):
                made += [PeerCell(scheme, point, 2 * hits + nth, lost) for lost in LOST]
        for point in _RECOVERING:
            made += [PeerCell(scheme, point, 1, lost) for lost in (OWN, ALL)]
        made += [PeerCell(scheme, "hold.read", count, OWN) for count in (1, 2)]
    return made


@contextlib.contextmanager
def agent_fault(fault: str | None) -> Iterator[None]:
    """Give this fault to the agents that start inside the `with` block."""
    with _starting:
        if fault is not None:
            os.environ[VARIABLE] = fault
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)


class _Scenario:
    """The scenario of one cell, step by step."""

    def __init__(self, cell: PeerCell, made: Cluster, reached: Path) -> None:
        self._cell, self._made, self._reached = cell, made, reached
        topology = Topology(cell.scheme, _GROUP, made.ranks)
        #: All pairs of a rank and a holder. Each node has one rank, with the number of the node.
        self._all = {
            (rank, share.holder)
            for node in range(len(made.ranks))
            for rank, shares in topology.shares(node).items()
            for share in shares
        }
        self._asking: threading.Thread | None = None
        made.inside = self._environment

    @contextlib.contextmanager
    def _environment(self, node: int) -> Iterator[None]:
        fault = f"agent:{self._cell.point}:{self._cell.count}:STOP:{self._reached}"
        with agent_fault(fault if node == 0 else None):
            yield

    def _start(self) -> None:
        self._made.start(self._cell.scheme, _GROUP, _PEER_TIMEOUT_S)

    # ------------------------------------------------------------------ up to the crash

    def begin(self) -> None:
        """Return when iteration 3 is staged and node 0's agent is stopped at its failpoint."""
        made, point = self._made, self._cell.point
        trouble.begin(made.root)
        self._start()
        self._save(1)
        self._await_held(1, self._all)
        self._keep(2, new_save_id(), made.trainers)
        self._await_held(2, self._all)
        save_id = new_save_id()
        own = {pair for pair in self._all if pair[0] == 0}
        if point in _SENDING:
            self._keep(3, save_id, sorted(made.trainers)[1:])
            self._await_held(3, self._all - own)
            self._ask(lambda: made.trainers[0].stage(3, save_id, state=SlotState.KEPT))
        elif point in _HOLDING:
            self._keep(3, save_id, [0])
            self._await_held(3, own)
            self._keep(3, save_id, sorted(made.trainers)[1:])
        else:
            self._keep(3, save_id, made.trainers)
            self._await_held(3, self._all)
            # The failpoint is hit by node 0's replacement, or by node 0 for node 1's replacement.
            lost = 1 if point == "hold.read" else 0
            made.lose(lost)
            self._start()
            newest = newest_saves(self._offers(), _SLOTS)
            self._ask(lambda: made.trainers[lost].client.recover(newest))
        eventually(f"node 0's agent hits {point}", self._stopped)
        if point in _HOLDING:
            self._await_held(3, {pair for pair in self._all if pair[1] != 0})

    def _stopped(self) -> int | None:
        """Return the pid of the stopped agent."""
        if not self._reached.exists():
            return None
        return next((pid for pid in self._made.nodes[0].agents() if state_of(pid) == "T"), None)

    def _save(self, iteration: int) -> None:
        self._made.stage(iteration)
        for rank, trainer in self._made.trainers.items():
            if error := trainer.outcome().error:
                raise CellError(f"rank {rank}: iteration {iteration}: {error}")

    def _keep(self, iteration: int, save_id: str, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._made.trainers[rank].keep(iteration, save_id)

    def _ask(self, question: Callable[[], object]) -> None:
        """Ask an agent in another thread, because it may stop before it answers."""

        def ask() -> None:
            with contextlib.suppress(AgentError):  # the agent is killed meanwhile
                question()

        self._asking = threading.Thread(target=ask, daemon=True)
        self._asking.start()

    def _held(self, iteration: int) -> Counter[tuple[int, int]]:
        """Return, by rank and holder, how often the logs report a held part."""
        logs = "".join(map(self._made.log, range(len(self._made.nodes))))
        lines = re.findall(rf"rank (\d+): iteration {iteration} is held by node (\d+) ", logs)
        return Counter((int(rank), int(holder)) for rank, holder in lines)

    def _requested_again(self) -> set[tuple[int, int]]:
        """Return the ranks whose parts were requested again, with the requesting holder."""
        pairs = [
            (rank, holder)
            for holder in range(len(self._made.nodes))
            for ranks in REQUESTED_AGAIN.findall(self._made.log(holder))
            for rank in ranks.split(", ")
        ]
        return {(int(rank), holder) for rank, holder in pairs}

    def _await_held(
        self,
        iteration: int,
        pairs: set[tuple[int, int]],
        beyond: Mapping[tuple[int, int], int] = MappingProxyType({}),
    ) -> None:
        """Wait until the logs report each of `pairs` at least once more than `beyond`."""

        def held() -> bool:
            counts = self._held(iteration)
            return all(counts[pair] > beyond.get(pair, 0) for pair in pairs)

        eventually(f"iteration {iteration} is held: {sorted(pairs)}", held)

    # ------------------------------------------------------------------ from the crash on

    def crash(self) -> None:
        """Kill the lost agent or nodes with their trainers, and replace the nodes."""
        made, lost = self._made, self._cell.lost
        if lost == NEXT:
            made.kill_agent(1)
            wake(self._stopped() or 0)
        else:
            made.kill_agent(0)
        if self._asking is not None:
            self._asking.join()
        if lost == AGENT:
            before = self._held(3)
            made.succeed(0)
            # The successor sends its own parts again, and gets back the parts that it held.
            self._await_held(3, {pair for pair in self._all if 0 in pair}, before)
            # Spoiled parity is computed again, also from the parts of other ranks.
            self._await_held(3, self._requested_again(), before)
        made.lose(*{OWN: [0], ALL: range(len(made.nodes))}.get(lost, [1]))

    def restore(self) -> RestorePoint:
        """Start the job again, as `held_in_memory` does; return the checkpoint that it restores.

        Raises:
            CellError: a rank has other bytes than it had at that iteration.
        """
        made = self._made
        self._start()
        offers = self._offers()
        newest = newest_saves(offers, _SLOTS)
        for rank in missing_ranks(offers, newest) if newest else ():
            made.trainers[rank].client.recover(newest)
        check_storage(made.root)
        shared = [save for save in held_saves(self._offers()) if not save.missing]
        if shared:
            restored = RestorePoint(shared[0].iteration, "memory")
            save_id = shared[0].save_id
        else:
            restored = RestorePoint(committed(made.root)[-1], "storage")
            save_id = stored(made.root, restored.iteration).manifest.save_id
        for rank, trainer in made.trainers.items():
            if shared:
                data = trainer.bytes_in(shared[0].by_rank[rank]["slot"])
            else:
                data = read_rank(stored(made.root, restored.iteration), trainer)
            if data != content(rank, restored.iteration, trainer.layout.nbytes):
                raise CellError(f"rank {rank}: other bytes than it had at {restored}")
        run = run_after(save_id, restored.iteration)
        for trainer in made.trainers.values():
            trainer.join(run)
        return restored

    def _offers(self) -> list[list[dict[str, Any]]]:
        trainers = [trainer for _, trainer in sorted(self._made.trainers.items())]
        return [[msgspec.structs.asdict(offer) for offer in trainer.take()] for trainer in trainers]

    def end(self, restored: int) -> None:
        """Fail if a save of the last run is not committed or held, or if files are left over."""
        made = self._made
        for iteration in (restored + 1, restored + 2):
            if iteration == restored + 2:
                trouble.end(made.root)
            before = self._held(iteration)
            self._save(iteration)
            self._await_held(iteration, self._all, before)
        check_storage(made.root)
        await_tidy(made.root, restored + 2)
        agents = [pid for node in made.nodes for pid in node.agents()]
        for trainer in made.trainers.values():
            trainer.hang_up(leave=True)
        for pid in agents:
            eventually(f"agent {pid} leaves", lambda pid=pid: not is_alive(pid))
        for node in made.nodes:
            check_left(node.runtime_dir)
