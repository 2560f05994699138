"""The commit against a model store: any interleaving of nodes, faults, deaths and late calls.

Three nodes hold the parts of one save. Their cores are driven as by the committer, and its real
code carries out their actions, call by call, between which anything may happen. The store shows
names of other nodes late, then in some listings only, loses answers, raises, and forgets at a power
loss what nobody has made durable. Shards vanish or shrink; agents hang between any two calls, are
killed, and are replaced by agents that find the slots. `FLASHCKPT_EXAMPLES` sets the number of
schedules.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import errno
import logging
import math
import os
import random
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from megatron_flashckpt.agent import commit_core as core
from megatron_flashckpt.agent import janitor, proposals
from megatron_flashckpt.agent.commit_core import CommitCore
from megatron_flashckpt.agent.committer import Committer
from megatron_flashckpt.agent.durable_commands import DurableCommands
from megatron_flashckpt.agent.janitor import Janitor
from megatron_flashckpt.agent.pending_save import PendingSave
from megatron_flashckpt.catalog.lineage import History, Save
from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import AlreadyExistsError, FlashCkptError, StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import CommitRecord, Coordinates, encode_items
from megatron_flashckpt.file_format.end import End, Failure, decode_failure, kind_of
from megatron_flashckpt.storage.store import Entry
from tests.support.histories import committed_save
from tests.support.memory_store import MemoryStore

SCHEDULES = int(os.environ.get("FLASHCKPT_EXAMPLES", "1000"))
NODES = ((0, 1), (2,), (3,))
WORLD = 4
TIMEOUT_S = 300.0
#: Names of other nodes that a schedule's store shows late: the end of the name, and seconds.
LATE = (("", 0.0), ("", 30.0), (".safetensors", 10.0))
#: Seconds for which a name that has come into view is missing in some listings.
WAVERING_S = 20.0
#: Seconds after which an agent may give up a storage that does not answer.
SHORTEST_OUTAGE_S = 4.0
#: Seconds in which a save is committed if nothing goes wrong.
AMPLE_S = 90.0 + WAVERING_S

ITERATION = 10
RUN = file_names.run_name(1, "aaaa")
SAVE, LATER = file_names.save_name(RUN, 1), file_names.save_name(RUN, 2)
DIRECTORY = file_names.iteration_dir(ITERATION)
END = f"{DIRECTORY}/{file_names.end_name(SAVE)}"
COMMON = f"{DIRECTORY}/{file_names.common_name(SAVE)}"
SHARDS = [f"{DIRECTORY}/{file_names.shard_name(rank, SAVE)}" for rank in range(WORLD)]
SHARD = b"a shard"
META: Any = SimpleNamespace(world_size=WORLD, description={}, common=b"common", ancestors=())
RECORDS = [
    CommitRecord(
        iteration=ITERATION,
        save_id=SAVE,
        rank=rank,
        coordinates=Coordinates(dp=rank),
        file=file_names.shard_name(rank, SAVE),
        nbytes=len(SHARD),
        header_digest="",
        template_fingerprint="one",
        template=encode_items(()),
        template_nbytes=0,
        placement=(),
    )
    for rank in range(WORLD)
]
_NODE: Any = SimpleNamespace(
    may_pass=may_pass,
    changed=threading.Condition(),
    options=SimpleNamespace(on_durable=None),
    run_number=0,
    trained_s=lambda _: None,
)
_NO_JANITOR: Any = None

_T = TypeVar("_T")


def is_record(name: str) -> bool:
    return file_names.is_record_name(name.rpartition("/")[2])


# ---------------------------------------------------------------------- the store


@dataclasses.dataclass
class Object:
    """A name in storage."""

    data: bytes
    created: float
    node: int
    is_durable: bool = False
    """True if the name survives a power loss."""


class Storage:
    """All names, and the promises about them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.names: dict[str, Object] = {}
        self.late_suffix, self.late_s = LATE[0]
        self.chance = random.Random(0)
        self.first_end: bytes | None = None
        #: Count of shards that vanished or shrank, by shard: when each did.
        self.harms = 0
        self.harmed: dict[str, int] = {}

    def visible(self, node: int, *, wavers: bool = False) -> MemoryStore:
        """Return the names as a node sees them.

        Args:
            wavers: names of a moment ago may be missing again.
        """
        store = MemoryStore()
        for name, item in self.names.items():
            late_s = self.late_s if name.endswith(self.late_suffix) else 0.0
            age_s = self.now - item.created
            is_missing = wavers and age_s < late_s + WAVERING_S and self.chance.random() < 0.5
            if item.node == node or (age_s >= late_s and not is_missing):
                store.objects[name] = item.data
        return store

    def create(self, name: str, data: bytes, node: int, harms: int) -> None:
        if name in self.names:
            raise AlreadyExistsError(errno.EEXIST, f"{name}: exists already")
        self.names[name] = Object(data, self.now, node)
        if name == END:
            assert self.first_end in (None, data), "an end was replaced"
            self.first_end = data
            if kind_of(data) is End.COMMITTED:
                self.check_whole(harms)

    def check_whole(self, harms: int) -> None:
        """Check the checkpoint.

        Args:
            harms: shards that were harmed later may be damaged.
        """
        for name in (*SHARDS, COMMON):
            if self.harmed.get(name, 0) > harms:
                continue
            item = self.names.get(name)
            assert item is not None, f"a checkpoint without {name}"
            assert item.is_durable, f"a checkpoint whose {name} is not durable"
            assert name == COMMON or item.data == SHARD, f"a checkpoint with a part of {name}"

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                continue
            assert not (name in (*SHARDS, COMMON) and self.may_count(name)), f"{name} was removed"
            del self.names[name]

    def may_count(self, name: str) -> bool:
        """Return whether the save may be, or become, a checkpoint that needs `name`."""
        if self.first_end is not None:
            return kind_of(self.first_end) is End.COMMITTED
        listed = [other.rpartition("/")[2] for other in self.names]
        recorded = file_names.ranks_with_record(listed, SAVE, WORLD)
        return name in {SHARDS[rank] for rank in recorded}

    def lose_power(self) -> None:
        self.names = {name: item for name, item in self.names.items() if item.is_durable}
        if END not in self.names:
            self.first_end = None
        elif kind_of(self.names[END].data) is End.COMMITTED:
            self.check_whole(0)


def abandon(storage: Storage, shard: str) -> None:
    """Do what `Writer.abandon` does: a name that exists is not touched."""


class _Pause(BaseException):
    """The code that carries out an action has reached its next call."""


@dataclasses.dataclass
class Fault:
    """Error that a call raises."""

    error: OSError
    takes_effect: bool


class View:
    """The store of one agent. Code runs from its start for each further call.

    Calls that were answered get the same answers again; one more call reaches the storage.
    """

    place = "place"
    pace = MemoryStore.pace

    def __init__(self, storage: Storage, node: int, *, is_free: bool = False) -> None:
        self._storage = storage
        self._node = node
        self._is_free = is_free
        self._answers: list[tuple[Any, OSError | None]] = []
        self._next = 0
        self._may_call = True
        self._fault: Fault | None = None
        self._harms = 0
        #: Names that a create has met: the server has told this node of them.
        self._met: set[str] = set()
        #: A name that does not become durable at once when it is created.
        self.fails_to_sync = ""

    def begin(self) -> None:
        self._answers.clear()
        self._harms = self._storage.harms

    def rewind(self, fault: Fault | None) -> None:
        self._next, self._may_call, self._fault = 0, True, fault

    def _call(self, call: Callable[[], _T]) -> _T:
        if self._is_free:
            return call()
        if self._next == len(self._answers):
            if not self._may_call:
                raise _Pause
            self._may_call = False
            self._answers.append(self._answer(call))
        value, error = self._answers[self._next]
        self._next += 1
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def _answer(self, call: Callable[[], object]) -> tuple[Any, OSError | None]:
        value, error = None, None
        if self._fault is None or self._fault.takes_effect:
            try:
                value = call()
            except OSError as raised:
                error = raised
        return value, error if self._fault is None else self._fault.error

    def get(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        def get() -> bytes:
            # Records are read because a listing has shown them; ends are looked for by name.
            visible: Container[str] = self._storage.names
            if is_record(name) or (name == END and name not in self._met):
                wavers = is_record(name)
                visible = self._storage.visible(self._node, wavers=wavers).objects
            if name not in visible:
                raise FileNotFoundError(errno.ENOENT, "does not exist", name)
            return self._storage.names[name].data[
                offset : None if nbytes is None else offset + nbytes
            ]

        return self._call(get)

    def create(self, name: str, data: bytes) -> None:
        harms = self._storage.harms if self._is_free else self._harms

        def create() -> None:
            try:
                self._storage.create(name, data, self._node, harms)
            except AlreadyExistsError:
                self._met.add(name)
                raise

        self._call(create)
        self.make_durable(name)

    def make_durable(self, name: str) -> None:
        def sync() -> None:
            if name == self.fails_to_sync:
                self.fails_to_sync = ""
                raise StorageError(errno.ETIMEDOUT, "no answer")
            if name in self._storage.names:
                self._storage.names[name].is_durable = True

        self._call(sync)

    def list(self, directory: str, *, sizes: bool = True) -> builtins.list[Entry]:
        return self._call(
            lambda: self._storage.visible(self._node, wavers=True).list(directory, sizes=sizes)
        )

    def stat(self, name: str) -> Entry | None:
        return self._call(lambda: self._storage.visible(self._node).stat(name))

    def delete(self, names: Iterable[str]) -> None:
        names = builtins.list(names)
        self._call(lambda: self._storage.delete(names))

    def discard_unfinished(self, directory: str, is_dead: Callable[[str], bool]) -> None:
        pass


# ---------------------------------------------------------------------- the agents


class _Broken(BaseException):
    """A promise is broken, or the code has an error: no answer of storage, as which it counts."""


class Driver(Committer):
    """The committer, of which only the code that carries out actions is called."""

    def _attempt(self, save: PendingSave, action: core.Action) -> core.Observation:
        try:
            return super()._attempt(save, action)
        except (FlashCkptError, OSError):
            raise
        except Exception as error:
            raise _Broken from error


DRIVER = Driver(_NODE, _NO_JANITOR, DurableCommands(_NODE))


class Node:
    """One agent: its save, and the action that it carries out."""

    def __init__(self, number: int, storage: Storage, *, is_adopter: bool = False) -> None:
        self.number = number
        self.is_adopter = is_adopter
        self.view: Any = View(storage, number)
        machine = CommitCore("place", WORLD, storage.now, TIMEOUT_S, MemoryStore.pace)
        self.save = PendingSave(self.view, ITERATION, SAVE, SAVE, machine)
        self.core = machine
        self.action: core.Action | None = None
        self.seen: core.Observation | None = None
        """The action's result, which is not noted yet."""
        self.troubled_since = math.inf
        self.has_read_end = False
        self.result: core.Conclude | None = None

    def stage(self, now: float, rank: int) -> None:
        self.save.metas[rank] = META
        self.core.note(now, core.Joined(rank, self.is_adopter))

    def call(self, fault: Fault | None = None) -> None:
        """Let one call of the action take effect."""
        assert self.action is not None
        self.view.rewind(fault)
        try:
            self.seen = DRIVER._carried_out(self.save, self.action)
        except _Pause:
            pass
        except _Broken as broken:
            raise AssertionError(broken.__cause__) from broken

    def note(self, now: float) -> None:
        seen, self.seen, self.action = self.seen, None, None
        assert seen is not None
        self.has_read_end |= isinstance(seen, core.Ended)
        self.troubled_since = (
            min(self.troubled_since, now) if isinstance(seen, core.Trouble) else math.inf
        )
        self.core.note(now, seen)


class Saves:
    """One save of three nodes; see the module."""

    def __init__(self) -> None:
        self.storage = Storage()
        self.nodes: list[Node] = []
        self.staged: set[int] = set()
        #: Nodes whose trainers have ended.
        self.ended: set[int] = set()
        #: Shards that have their name, but are not durable yet, by rank: the agent that writes.
        self.writing: dict[int, Node] = {}
        #: Ranks that have lost their part for good.
        self.lost: set[int] = set()
        self.late_calls: list[Node] = []
        #: Errors of all calls, by node.
        self.outages: dict[int, int] = {}
        #: Calls until all machines lose power; None: they do not.
        self.calls: int | None = None
        self.is_faultless = True
        self.is_dark = False

    def begin(self, late: tuple[str, float], first: int, calls: int | None) -> None:
        self.storage.late_suffix, self.storage.late_s = late
        self.calls = calls
        self.nodes = [Node(number, self.storage) for number in range(len(NODES))]
        for rank in (first, 2, 3):
            self.stage_rank(rank)

    def agent_of(self, rank: int) -> Node:
        return next(node for node in self.nodes if rank in NODES[node.number])

    def stage_rank(self, rank: int) -> None:
        agent = self.agent_of(rank)
        if rank not in self.staged and agent.number not in self.ended and agent.result is None:
            self.staged.add(rank)
            agent.stage(self.storage.now, rank)

    def advance(self, agent: Node) -> None:
        """Go on until a call has taken effect, or a result is noted."""
        now = self.storage.now
        if agent.result is not None or self.is_dark:
            return
        if agent.seen is not None:
            agent.note(now)
            return
        if agent.action is None:
            ranks = frozenset(NODES[agent.number])
            has_ended = agent.number in self.ended
            trainers = core.Trainers(gone=ranks) if has_ended else core.Trainers(ranks)
            action = agent.core.next(now, trainers)
            if isinstance(action, core.Conclude):
                self.conclude(agent, action)
                return
            if isinstance(action, core.Wait):
                return
            agent.action = action
            agent.view.begin()
        code = self.outages.get(agent.number)
        agent.call(None if code is None else Fault(StorageError(code, "an outage"), False))
        if self.calls is not None:
            self.calls -= 1
            if self.calls == 0:
                self.lose_power()

    def conclude(self, agent: Node, result: core.Conclude) -> None:
        agent.result = result
        first = self.storage.first_end
        if result.end is None:
            assert result.failure is not None, "no result without a reason"
            assert not agent.has_read_end, "an end that was read is not told"
            waited_s = self.storage.now - agent.core.staged_at
            outage_s = self.storage.now - agent.troubled_since
            is_due = waited_s > TIMEOUT_S or outage_s > SHORTEST_OUTAGE_S
            assert is_due, "storage may answer in a moment"
            return
        assert first is not None, "an end that nobody has created"
        assert kind_of(first) is result.end, "nodes hear different ends"
        if result.end is End.COMMITTED:
            assert result.failure is None
            is_safe = END in self.storage.names and self.storage.names[END].is_durable
            assert is_safe or not agent.core.holds_rank_0, "the tracker names what may be lost"
        else:
            assert result.failure == decode_failure(first), "not the reason that the end has"
            ranks = set(agent.save.metas)
            janitor.remove_own(self.free(agent.number), ITERATION, SAVE, ranks)
            own = {SHARDS[rank] for rank in ranks} | {COMMON for rank in ranks if rank == 0}
            assert not own & self.storage.names.keys(), "files of a failed save take space"

    def free(self, number: int) -> Any:
        """Return a store whose calls are not paused at."""
        return View(self.storage, number, is_free=True)

    # ------------------------------------------------------------------ rules

    def tick(self, seconds: float) -> None:
        self.storage.now += seconds

    def go_on(self, node: int, calls: int) -> None:
        for _ in range(calls):
            self.advance(self.nodes[node])

    def persist_and_go_on(self, ranks: list[int], calls: int) -> None:
        """The most usual thing."""
        for rank in ranks:
            self.stage_rank(rank)
            self.write_shard(rank, True)
        for agent in {self.agent_of(rank).number: self.agent_of(rank) for rank in ranks}.values():
            for _ in range(calls):
                self.advance(agent)

    def stage_the_rest(self) -> None:
        for rank in NODES[0]:
            self.stage_rank(rank)

    def trainers_end(self, node: int) -> None:
        self.ended.add(node)
        self.is_faultless = self.is_faultless and self.staged >= set(NODES[node])

    def write_shard(self, rank: int, finishes: bool) -> None:
        if self.is_dark or rank not in self.staged:
            return
        agent, now = self.agent_of(rank), self.storage.now
        if self.writing.get(rank) is not agent:
            if rank in agent.core.durable or agent.core.is_over or rank in self.lost:
                return
            free = self.free(agent.number)
            if agent.is_adopter and (end := proposals.look(free, ITERATION, SAVE)) is not None:
                agent.has_read_end = True
                agent.core.note(now, end)
                return
            self.writing[rank] = agent
        if not finishes:
            return
        del self.writing[rank]
        if SHARDS[rank] not in self.storage.names:  # else a former agent has written it
            self.storage.harmed.pop(SHARDS[rank], None)
            self.storage.names[SHARDS[rank]] = Object(SHARD, now, agent.number)
        self.storage.names[SHARDS[rank]].is_durable = True
        agent.core.note(now, core.Durable(RECORDS[rank]))
        if agent.core.has_failed:
            janitor.remove_own(self.free(agent.number), ITERATION, SAVE, {rank})

    def fail_to_write(self, rank: int) -> None:
        """An error that passes ends the attempt, which is repeated."""
        if self.writing.pop(rank, None) is not None:
            abandon(self.storage, SHARDS[rank])

    def lose_part(self, rank: int) -> None:
        agent = self.agent_of(rank)
        if rank in self.staged and rank not in agent.core.durable and rank not in self.writing:
            self.is_faultless = False
            self.lost.add(rank)
            agent.core.note(self.storage.now, core.GivenUp(Failure(failed="no space")))

    def give_up(self, node: int) -> None:
        self.is_faultless = False
        failure = Failure(failed="training went on", is_final=True)
        self.nodes[node].core.note(self.storage.now, core.GivenUp(failure))

    def begin_or_end_outage(self, node: int, code: int) -> None:
        self.is_faultless = False
        if self.outages.pop(node, None) is None:
            self.outages[node] = code

    def raise_error(self, node: int, code: int, takes_effect: bool) -> None:
        agent = self.nodes[node]
        if agent.action is None or agent.seen is not None or self.is_dark:
            return
        self.is_faultless = False
        agent.call(Fault(StorageError(code, "an error"), takes_effect))

    def fail_to_sync(self, node: int, name: str) -> None:
        self.is_faultless = False
        self.nodes[node].view.fails_to_sync = name

    def harm_shard(self, rank: int, shrinks: bool) -> None:
        """Another program removes or cuts a shard."""
        item = self.storage.names.get(SHARDS[rank])
        if item is None:
            return
        self.is_faultless = False
        self.storage.harms += 1
        self.storage.harmed[SHARDS[rank]] = self.storage.harms
        if shrinks:
            item.data = SHARD[:-1]
        else:
            del self.storage.names[SHARDS[rank]]

    def replace_agent(self, node: int, resumes_elsewhere: bool) -> None:
        """Kill an agent; another one takes the slots that memory still holds.

        The call that the killed agent was in may take effect much later.
        """
        former = self.nodes[node]
        if former.result is not None or self.is_dark:
            return
        self.is_faultless = False
        if former.action is not None and former.seen is None:
            self.late_calls.append(former)
        agent = self.nodes[node] = Node(node, self.storage, is_adopter=True)
        for rank in self.staged & set(NODES[node]):
            agent.stage(self.storage.now, rank)
            self.writing.pop(rank, None)
        if resumes_elsewhere:
            self.give_up(node)

    def late_call_takes_effect(self) -> None:
        if self.late_calls and not self.is_dark:
            self.late_calls.pop(0).call()

    def later_save_is_committed(self) -> None:
        """The janitor of rank 0's agent ends the save, unless it is pending there."""
        if self.nodes[0].result is not None and not self.is_dark:
            self.tidy(math.inf)

    def tidy(self, deadline_s: float) -> None:
        later = committed_save(self.free(0), Save(ITERATION + 10, LATER), History(RUN))
        Janitor(deadline_s=deadline_s).tidy(later)

    def lose_power(self) -> None:
        self.is_dark = True
        self.storage.lose_power()
        self.check_tracked()

    def check_tracked(self) -> None:
        result = self.nodes[0].result
        if result is not None and result.end is End.COMMITTED:
            assert END in self.storage.names, "the tracker names a save that was lost"

    def finish(self) -> None:
        if not self.is_dark:
            self.drain()
        self.storage.lose_power()
        self.check_tracked()
        self.check_removals()

    def drain(self) -> None:
        """Nobody waits for ever: with a storage that answers, all agents come to a result."""
        ample = self.storage.now + AMPLE_S
        self.is_faultless &= ample < TIMEOUT_S
        for _ in range(1000):
            if self.is_dark:
                return
            for rank in range(WORLD):
                self.stage_rank(rank)
                self.write_shard(rank, True)
            for agent in self.nodes:
                self.advance(agent)
            if all(agent.result is not None for agent in self.nodes):
                break
            self.storage.now += 0.5
        for agent in self.nodes:
            assert agent.result is not None, "a node waits for ever"
            assert not self.is_faultless or agent.result.end is End.COMMITTED, "failed for nothing"
        assert not self.is_faultless or self.storage.now <= ample, "waited for nothing"

    def check_removals(self) -> None:
        """A later job removes what has failed, and keeps the checkpoint."""
        first = self.storage.names.get(END)
        self.storage.late_s = 0.0
        self.storage.now += 2 * WAVERING_S
        for _ in range(3):
            self.tidy(0.0)
        if first is None or kind_of(first.data) is End.FAILED:
            assert not self.storage.names, "files of a failed save stay"
        else:
            assert END in self.storage.names, "a checkpoint was removed"
            self.storage.check_whole(0)
            left = {name for name in self.storage.names if is_record(name)}
            assert not left or self.storage.harms, "records stay"  # as evidence of a damaged one


# ---------------------------------------------------------------------- the schedules


def _node(draw: random.Random) -> int:
    return draw.randrange(len(NODES))


def _rank(draw: random.Random) -> int:
    return draw.randrange(WORLD)


def _flag(draw: random.Random) -> bool:
    return draw.random() < 0.5


def _error(draw: random.Random) -> int:
    return draw.choice((errno.ETIMEDOUT, errno.ETIMEDOUT, errno.ENOSPC))


Draw = Callable[[random.Random], tuple[Any, ...]]
STEPS: dict[str, Draw] = {
    "tick": lambda draw: (draw.choice((0.02, 0.5, 3.0, 12.0, 31.0)),),
    "go_on": lambda draw: (_node(draw), draw.randint(1, 12)),
    "persist_and_go_on": lambda draw: (draw.sample(range(WORLD), 3), draw.randint(1, 12)),
    "stage_the_rest": lambda draw: (),
    "write_shard": lambda draw: (_rank(draw), _flag(draw)),
}
FAULTS: dict[str, Draw] = {
    "trainers_end": lambda draw: (_node(draw),),
    "fail_to_write": lambda draw: (_rank(draw),),
    "lose_part": lambda draw: (_rank(draw),),
    "give_up": lambda draw: (_node(draw),),
    "begin_or_end_outage": lambda draw: (_node(draw), _error(draw)),
    "raise_error": lambda draw: (_node(draw), _error(draw), _flag(draw)),
    "fail_to_sync": lambda draw: (_node(draw), draw.choice((COMMON, END))),
    "harm_shard": lambda draw: (_rank(draw), _flag(draw)),
    "replace_agent": lambda draw: (_node(draw), _flag(draw)),
    "late_call_takes_effect": lambda draw: (),
    "later_save_is_committed": lambda draw: (),
}
Schedule = list[tuple[str, tuple[Any, ...]]]


def drawn(seed: int) -> Schedule:
    """Return a schedule with some kinds of faults: with all of them, few saves would come far."""
    draw = random.Random(seed)
    faults = draw.sample(sorted(FAULTS), draw.randint(0, 4))
    power = draw.choice((None, None, draw.randint(1, 60)))
    names = [draw.choice([*STEPS, *STEPS, *faults]) for _ in range(draw.randint(1, 40))]
    steps = [(name, (STEPS | FAULTS)[name](draw)) for name in names]
    return [("begin", (draw.choice(LATE), draw.choice(NODES[0]), power)), *steps]


def failure_of(schedule: Schedule) -> AssertionError | None:
    """Return the promise that the schedule breaks; None if it breaks none."""
    saves = Saves()
    try:
        for name, arguments in schedule:
            getattr(saves, name)(*arguments)
        saves.finish()
    except AssertionError as error:
        return error
    return None


def shortened(schedule: Schedule) -> Schedule:
    """Return the schedule without the steps that it does not need to break a promise."""
    for index in reversed(range(1, len(schedule))):
        shorter = schedule[:index] + schedule[index + 1 :]
        if failure_of(shorter) is not None:
            schedule = shorter
    return schedule


def check(schedules: int = SCHEDULES) -> None:
    for seed in range(schedules):
        if failure_of(drawn(seed)) is not None:
            shortest = shortened(drawn(seed))
            steps = "\n".join(f"    {name}{arguments}" for name, arguments in shortest)
            raise AssertionError(f"schedule {seed}:\n{steps}") from failure_of(shortest)


# ---------------------------------------------------------------------- the tests


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """Errors are the rule here."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_no_interleaving_breaks_a_promise() -> None:
    check()


def _believes_itself(self: CommitCore, now: float, seen: core.Observation) -> None:
    if isinstance(seen, core.Ended) and isinstance(self._verdict, Failure):
        seen = core.Ended(End.FAILED, self._verdict, True)
    _note(self, now, seen)


def _waits_for_ever(self: CommitCore, now: float, trainers: core.Trainers) -> core.Action:
    self.timeout_s = 1e9
    return _next(self, now, trainers)


def _tracks_what_may_be_lost(self: CommitCore, now: float, trainers: core.Trainers) -> core.Action:
    if self.end is not None:
        return core.Conclude(self.end.end, self.end.failure)
    return _next(self, now, trainers)


def _does_not_read_back(store: Any, iteration: int, save_id: str, end: bytes) -> tuple[bytes, bool]:
    with contextlib.suppress(AlreadyExistsError):
        store.create(END, end)
    return end, True


def _believes_the_records(*_: object) -> None:
    pass


def test_an_agent_that_cannot_see_a_record_yet_leaves_its_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule: Schedule = [
        ("begin", (("", 30.0), 1, None)),
        ("write_shard", (3, True)),
        ("go_on", (2, 9)),
        ("replace_agent", (2, False)),
        ("write_shard", (3, False)),
        ("fail_to_write", (3,)),
    ]
    assert failure_of(schedule) is None
    removes = lambda storage, shard: storage.delete([shard])  # noqa: E731
    monkeypatch.setattr(sys.modules[__name__], "abandon", removes)
    assert "was removed" in str(failure_of(schedule))


_next, _note = CommitCore.next, CommitCore.note


@pytest.mark.parametrize(
    ("owner", "name", "without"),
    [
        (CommitCore, "next", _waits_for_ever),
        (CommitCore, "next", _tracks_what_may_be_lost),
        (CommitCore, "note", _believes_itself),
        (proposals, "create_end", _does_not_read_back),
        (proposals, "check_shards", _believes_the_records),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).strip("_"),
)
def test_each_rule_is_needed(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, without: object
) -> None:
    monkeypatch.setattr(owner, name, without)
    with pytest.raises(AssertionError):
        check(10 * SCHEDULES)
