"""Cells of nodes that hold copies (or parity) for each other: an agent is stopped, a node is lost.

Agents are the real ones, a runtime directory each; trainers have no Megatron and live in this
process. Iteration 1 is committed and held by others; 2 and 3 are meant for memory only, so that
storage cannot stand in for what other nodes should have had: whoever gets them back has them from a
holder. Node 0's agent is stopped while 3 is being sent, or on the way back.
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
from megatron_flashckpt.load.offers import common_saves, lacking_ranks, newest_saves
from megatron_flashckpt.memory.slot import SlotState
from tests.agent.test_shard_writer import read_rank, stored
from tests.crash import trouble
from tests.crash.job import CellError, eventually, state_of, wake
from tests.crash.story import Found
from tests.crash.truth import await_tidy, check_left, check_storage, committed
from tests.support.cluster import Cluster, cluster
from tests.support.trainer import PATIENCE_S, content, is_alive, new_save_id

#: What is lost when node 0's agent stands at its point.
OWN, NEXT, AGENT, ALL = "its node", "the next node", "the agent, then the next node", "all nodes"
LOST = (OWN, NEXT, AGENT, ALL)
#: Nodes by scheme, with one rank each, and the parts that a checkpoint is cut into.
NODES = {"copy": 2, "xor": 3}
_SENDING = ("send.labelled", "send.begun", "send.chunk", "send.ended")
_HOLDING = ("hold.begun", "hold.chunk", "hold.ended")
_RECOVERING = ("recover.asked", "recover.filled", "recover.installed")
#: A checkpoint has three chunks of 4 MiB, its half has two.
_NUMEL = 1_600_000
_GROUP = 3
_SLOTS = 2
_CHUNKS = {"copy": 3, "xor": 2}
#: Longest wait for the answer of an agent that is gone.
_PEER_TIMEOUT_S = 2.0
#: What an agent is to do is in the environment that it is started in, which is that of all threads.
_starting = threading.Lock()


@dataclasses.dataclass(frozen=True)
class PeerCell:
    """Node 0's agent comes to `point`; the points of a replacement are its replacement's."""

    scheme: str
    point: str
    count: int
    lost: str

    @property
    def may_find(self) -> set[int]:
        """The iterations that the last start may go on from."""
        sent_by_it = self.point in _SENDING
        if self.lost == ALL or self.point == "hold.read":
            return {1}
        if self.lost == AGENT or self.point in _RECOVERING:
            return {3}
        if self.lost == OWN:
            # The others had theirs held; that of rank 0 is complete when the last holder has it.
            if not sent_by_it:
                return {3}
            if self.point != "send.ended":
                return {2}
            return {3} if self.scheme == "copy" else {2, 3}
        # The agent goes on. With parity its own part is needed, too, and what it was being given;
        # chunks that had been sent may have come.
        if self.scheme == "xor" or self.point == "hold.chunk":
            return {2, 3}
        return {2} if self.point == "hold.begun" else {3}

    def __str__(self) -> str:
        return f"{self.scheme}: agent:{self.point}:{self.count}, {self.lost} lost"


def peer_cells() -> list[PeerCell]:
    """Return all cells of nodes that hold copies for each other."""
    made = []
    for scheme, nodes in NODES.items():
        for point in (*_SENDING, *_HOLDING):
            # How often it comes there in each save; what counts is the third.
            each = 1 if point == "send.labelled" else nodes - 1
            if point.endswith("chunk"):
                each *= _CHUNKS[scheme]
            for nth in sorted({1, each}):
                made += [PeerCell(scheme, point, 2 * each + nth, lost) for lost in LOST]
        for point in _RECOVERING:
            made += [PeerCell(scheme, point, 1, lost) for lost in (OWN, ALL)]
        made += [PeerCell(scheme, "hold.read", count, OWN) for count in (1, 2)]
    return made


def peer_sample() -> list[PeerCell]:
    """Return cells that stand for all of them in the test suite."""
    return [
        PeerCell("copy", "send.chunk", 2 * _CHUNKS["copy"] + 1, OWN),
        PeerCell("copy", "hold.chunk", 2 * _CHUNKS["copy"] + 1, AGENT),
        PeerCell("xor", "send.chunk", 9, AGENT),
    ]


@contextlib.contextmanager
def agent_fault(fault: str | None) -> Iterator[None]:
    """Let the agents that are started meanwhile come to this fault."""
    with _starting:
        if fault is not None:
            os.environ[VARIABLE] = fault
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)


def tell_of_peers(cell: PeerCell, home: Path) -> list[Found]:
    """Let `cell` happen in the empty directory `home`; return what was restored in it.

    Raises:
        CellError: something is not as it should be.
    """
    with cluster(home, [1] * NODES[cell.scheme], numel=_NUMEL) as made:
        story = _Story(cell, made, home / "reached")
        story.begin()
        story.crash()
        found = story.restore()
        if found.iteration not in cell.may_find:
            raise CellError(f"{found} was restored, expected one of {cell.may_find}")
        story.end(found.iteration)
        return [found]


class _Story:
    """The job of one cell, step by step."""

    def __init__(self, cell: PeerCell, made: Cluster, reached: Path) -> None:
        self._cell, self._made, self._reached = cell, made, reached
        topology = Topology(cell.scheme, _GROUP, made.ranks)
        #: Rank and holder, of all that is to be held; each node has one rank, of its number.
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
        """Return when iteration 3 is staged and node 0's agent stands at its point."""
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
            self._keep_in_background(3, save_id, 0)
        elif point in _HOLDING:
            self._keep(3, save_id, [0])
            self._await_held(3, own)
            self._keep(3, save_id, sorted(made.trainers)[1:])
        else:
            self._keep(3, save_id, made.trainers)
            self._await_held(3, self._all)
            # Its own replacement comes to the point; or it does, where that of node 1 needs it.
            lost = 1 if point == "hold.read" else 0
            made.lose(lost)
            self._start()
            newest = newest_saves(self._offers(), _SLOTS)
            self._ask(lambda: made.trainers[lost].client.recover(newest))
        eventually(f"node 0's agent comes to {point}", self._stopped)
        if point in _HOLDING:
            self._await_held(3, {pair for pair in self._all if pair[1] != 0})

    def _stopped(self) -> int | None:
        """Return the agent that stands still."""
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

    def _keep_in_background(self, iteration: int, save_id: str, rank: int) -> None:
        """Stage; whether the agent still answers the doorbell nobody knows."""
        trainer = self._made.trainers[rank]
        slot = trainer.begin(iteration, save_id, PATIENCE_S)
        if slot is None:
            raise CellError(f"rank {rank}: no slot for iteration {iteration}")
        trainer.fill(slot, content(rank, iteration, trainer.layout.nbytes))
        slot.set_state(SlotState.KEPT)
        self._ask(lambda: trainer.client.staged(slot.index))

    def _ask(self, question: Callable[[], None]) -> None:
        def ask() -> None:
            with contextlib.suppress(AgentError):  # it is killed meanwhile
                question()

        self._asking = threading.Thread(target=ask, daemon=True)
        self._asking.start()

    def _held(self, iteration: int) -> Counter[tuple[int, int]]:
        """Return how often each rank's part was said to be with a holder."""
        logs = "".join(map(self._made.log, range(len(self._made.nodes))))
        said = re.findall(rf"rank (\d+): iteration {iteration} is held by node (\d+) ", logs)
        return Counter((int(rank), int(holder)) for rank, holder in said)

    def _asked_again(self) -> set[tuple[int, int]]:
        """Return whose parts holders have asked for again, and which holders."""
        said = [
            (rank, holder)
            for holder in range(len(self._made.nodes))
            for ranks in re.findall(
                r"iteration 3: ranks \{(.*)\} are asked", self._made.log(holder)
            )
            for rank in ranks.split(", ")
        ]
        return {(int(rank), holder) for rank, holder in said}

    def _await_held(
        self,
        iteration: int,
        pairs: set[tuple[int, int]],
        beyond: Mapping[tuple[int, int], int] = MappingProxyType({}),
    ) -> None:
        """Wait until all of these are held (said once more than `beyond`)."""

        def held() -> bool:
            said = self._held(iteration)
            return all(said[pair] > beyond.get(pair, 0) for pair in pairs)

        eventually(f"iteration {iteration} is held: {sorted(pairs)}", held)

    # ------------------------------------------------------------------ from the crash on

    def crash(self) -> None:
        """Kill what is lost, trainers included, and have new nodes in its place."""
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
            # Its own are sent anew, and it gets back what it held for others.
            self._await_held(3, {pair for pair in self._all if 0 in pair}, before)
            # Parity that it had spoiled is made again, of the others' parts, too.
            self._await_held(3, self._asked_again(), before)
        made.lose(*{OWN: [0], ALL: range(len(made.nodes))}.get(lost, [1]))

    def restore(self) -> Found:
        """Start the job again, as `held_in_memory` does; return what it goes on from.

        Raises:
            CellError: ranks do not have what they should at that iteration.
        """
        made = self._made
        self._start()
        offers = self._offers()
        newest = newest_saves(offers, _SLOTS)
        for rank in lacking_ranks(offers, newest) if newest else ():
            made.trainers[rank].client.recover(newest)
        check_storage(made.root)
        shared = common_saves(self._offers())
        if shared:
            found = Found(shared[0][0]["iteration"], "memory")
            save_id = shared[0][0]["save_id"]
        else:
            found = Found(committed(made.root)[-1], "storage")
            save_id = stored(made.root, found.iteration).manifest.save_id
        for rank, trainer in made.trainers.items():
            if shared:
                data = trainer.bytes_in(shared[0][rank]["slot"])
            else:
                data = read_rank(stored(made.root, found.iteration), trainer)
            if data != content(rank, found.iteration, trainer.layout.nbytes):
                raise CellError(f"rank {rank}: not what it had at {found}")
        for trainer in made.trainers.values():
            trainer.client.adopt(save_id, found.iteration)
        return found

    def _offers(self) -> list[list[dict[str, Any]]]:
        trainers = [trainer for _, trainer in sorted(self._made.trainers.items())]
        return [[msgspec.structs.asdict(offer) for offer in trainer.take()] for trainer in trainers]

    def end(self, restored: int) -> None:
        """Refuse a last life in which something is not saved or held, and whatever is left."""
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
