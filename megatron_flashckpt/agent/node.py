"""Shared state of the agent: the node's trainers and their slots, behind one lock."""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.freeing import free
from megatron_flashckpt.agent.held_directory import HeldDirectory
from megatron_flashckpt.agent.incarnations import Incarnations
from megatron_flashckpt.agent.life import AgentFacts, own_unit
from megatron_flashckpt.agent.local_copies import LocalCopies
from megatron_flashckpt.agent.log import log_in_save_directory
from megatron_flashckpt.agent.process import replace_of_stores
from megatron_flashckpt.agent.rank_slots import RankSlots
from megatron_flashckpt.agent.settings import AgentSettings, differences
from megatron_flashckpt.agent.trace_files import Traces
from megatron_flashckpt.agent.write_limits import Flow
from megatron_flashckpt.catalog.lineage import History, sort_key
from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.file_format.file_names import run_file, run_number, run_of
from megatron_flashckpt.file_format.run_object import RunObject, decode_run
from megatron_flashckpt.storage.direct_io import DirectIo
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from megatron_flashckpt.agent.peers.redundancy import Redundancy
    from megatron_flashckpt.agent.process import AgentProcess


class AgentOptions(AgentSettings, frozen=True, kw_only=True):
    """Options with which the agent is started."""

    root: str
    foreground: bool = False
    """`flashckpt agent --foreground`: started without a trainer; survives all trainers."""


def options_of(settings: AgentSettings, root: str, *, foreground: bool) -> AgentOptions:
    """Return the start options of an agent with these settings."""
    return AgentOptions(root=root, foreground=foreground, **msgspec.structs.asdict(settings))


class Trainer:
    """The agent's state of one trainer, kept across the trainer's restarts."""

    def __init__(self) -> None:
        self.slots: RankSlots | None = None
        self.retired: list[RankSlots] = []
        self.awaited: set[str] = set()
        """Saves that the connected trainer has staged and whose results were not reported."""
        self.unreported: list[p.Outcome] = []
        self.notices: list[p.Notice] = []
        self.left = False
        self.connection: socket.socket | None = None
        self.incarnations = Incarnations()
        self.run = ""
        """The run that the connected trainer has opened; empty: none yet."""
        self.followed = ""
        """The run for which the rank's slots were looked through last."""

    @property
    def all_slots(self) -> list[RankSlots]:
        """The slots of the rank, retired ones too."""
        return [*([] if self.slots is None else [self.slots]), *self.retired]

    def report(self, item: p.Outcome | p.Notice) -> None:
        """Add to what the trainer's next request returns. The caller holds the lock."""
        if isinstance(item, p.Notice):
            self.notices.append(item)
        else:
            self.unreported.append(item)
        self.signal()

    def signal(self) -> None:
        """Have the trainer ask: its next `Poll` gets another answer than before.

        Without a slab there is no counter, and the trainer asks in every iteration. The caller
        holds the lock and has made the change.
        """
        if self.slots is not None:
            self.slots.slab.signals.news += 1

    def forget_saves(self) -> None:
        """Drop the results that a former trainer of this rank was waiting for.

        A failed save of a crashed run must not stop a job that has restarted well.
        """
        self.awaited.clear()
        self.unreported.clear()
        self.notices.clear()


class Node:
    """State that all threads share; changed under `changed`, which is notified."""

    def __init__(self, options: AgentOptions, process: AgentProcess | None = None) -> None:
        """Set up empty state; `process` gets changed settings applied."""
        self.options = options
        self._process = process
        self.direct_io = DirectIo(options.direct_io)
        self.leads = False
        """True: rank 0 of the newest run has opened it here, and may have ended since."""
        self.run: RunObject | None = None
        """The newest run that trainers of this node have opened; None: they have opened none."""
        self.history: History | None = None
        """History of that run."""
        self.save_at = 0
        """Iteration of that run after which somebody has requested a save; 0: none."""
        self._opened_at = 0.0
        """Time since which this agent has known that run; `time.monotonic`."""
        self.held = HeldDirectory(options.root, self._has_own_run)
        #: By path, by the key with which the directory came back, and by `_environments`.
        self._stores: dict[tuple[str, str, int], Store] = {}
        #: How often the environment for object stores has changed. Counted after the change, so
        #: that a store with the newest number was opened in the newest environment.
        self._environments = 0
        self.flow = Flow(options.write_threads, options.write_mib_per_s)
        self.traces = Traces(options.root, options.trace)
        self.local_copies = LocalCopies(options.root, options.local_tier)
        log_in_save_directory(options.root, options.log_in_save_directory)
        self.changed = threading.Condition()
        self.ranks: dict[int, Trainer] = {}
        self.peers: Redundancy | None = None
        self._facts = AgentFacts(time.time(), options.foreground, own_unit())

    @property
    def run_number(self) -> int:
        """Number of the newest run that trainers of this node have opened; 0: none."""
        return 0 if self.run is None else run_number(self.run.name)

    def open_run(self, number: int, run: RunObject) -> bool:
        """Note the run of a rank; return whether this node had no run as new as this one.

        An earlier process of a job that was started twice does not replace the later run. The
        caller holds the lock.
        """
        self.ranks[number].run = run.name
        is_new = self.run is None or sort_key(run.name) > sort_key(self.run.name)
        if is_new:
            self.run, self.history, self.leads = run, History(run.name, run.ancestors), False
            self._opened_at, self.save_at = time.monotonic(), 0
        self.leads = self.leads or (number == 0 and run == self.run)
        return is_new

    def may_pass(self, error: BaseException) -> bool:
        """Return whether a retry in the save directory may succeed: not if that was removed."""
        return may_pass(error) and not self.held.is_removed()

    def trained_s(self, run: str) -> float | None:
        """Return for how many seconds a run has trained; None: it is not the newest one here.

        The caller holds the lock.
        """
        is_newest = self.run is not None and self.run.name == run
        return time.monotonic() - self._opened_at if is_newest else None

    def _has_own_run(self) -> bool:
        """Return whether the directory at `root` has the object of this node's newest run."""
        name = run_file(self.run_number)
        return self.run == decode_run(open_store(self.options.root).get(name), name)

    def facts(self) -> AgentFacts:
        """Return the facts about this agent for a new trainer. The caller holds the lock."""
        saves = self.saves()
        iterations = tuple(sorted({iteration for iteration, _ in saves}))
        newest = max([self.run_number, *(run_number(run_of(save_id)) for _, save_id in saves)])
        return msgspec.structs.replace(self._facts, iterations=iterations, run_number=newest)

    def configure(self, settings: AgentSettings) -> tuple[str, ...]:
        """Apply other settings; return the changed ones. The caller holds the lock.

        Running writes keep their settings, except for the rate limit, which all writes share.
        """
        former = self.options
        if settings.direct_io != former.direct_io:  # otherwise keep the measurements
            self.direct_io = DirectIo(settings.direct_io)
            self._stores.clear()
        self.options = options_of(settings, former.root, foreground=former.foreground)
        log_in_save_directory(former.root, settings.log_in_save_directory)
        self.flow.threads = settings.write_threads
        self.flow.limit(settings.write_mib_per_s)
        self.traces.configure(settings.trace)
        self.local_copies.configure(settings.local_tier)
        if self._process is not None:
            self._process.apply(settings)
        return differences(former, settings)

    def reach_stores(self, of_stores: dict[str, str]) -> None:
        """Use the credentials and endpoints of the run that trains: a restart may have new ones.

        Saves that are under way keep their stores. The caller holds the lock.
        """
        if replace_of_stores(of_stores):
            self._environments += 1
            logger.info("object stores: this run has other credentials or endpoints")

    @property
    def store(self) -> Store:
        """The save directory, at the path that the agent was started with."""
        return self.store_at(self.options.root)

    def store_at(self, root: str) -> Store:
        """Return the save directory at the path that one of its trainers uses.

        All saves share the store of a path, which has seen the directory and makes no other one.
        """
        key = root, self.held.key, self._environments
        found = self._stores.get(key)
        return found or self._stores.setdefault(key, open_store(root, self.direct_io))

    def beat(self) -> None:
        """Show all trainers that this process runs and that its lock is free.

        Those of the newest run learn of the save that is requested.
        """
        with self.changed:
            newest = None if self.run is None else self.run.name
            for number, slots in self.own_slots().items():
                signals = slots.slab.signals
                signals.save_at = self.save_at if self.ranks[number].run == newest else 0
                signals.beats += 1

    def saves(self) -> set[tuple[int, str]]:
        """Return iteration and id of every save in a slot of any rank. The caller holds the lock.

        The ranks may be those of an earlier run.
        """
        held = [slots.offers() for slots in self.own_slots().values()]
        return {(offer.iteration, offer.save_id) for offers in held for offer in offers}

    def own_slots(self) -> dict[int, RankSlots]:
        """Return the slots of this node's ranks."""
        with self.changed:
            ranks = self.ranks.items()
            return {number: rank.slots for number, rank in ranks if rank.slots is not None}

    def retire_slots(self, rank: Trainer) -> None:
        """Detach a rank's slots; `drop_retired` frees them. The caller holds the lock."""
        if rank.slots is not None:
            rank.retired.append(rank.slots)
            rank.slots = None

    def replace_slots(self, rank: Trainer, slots: RankSlots) -> None:
        self.retire_slots(rank)
        rank.slots = slots
        self.drop_retired(rank)

    def drop_retired(self, rank: Trainer) -> None:
        """Begin to free retired slabs that are not being persisted. The caller holds the lock."""
        for slots in [slots for slots in rank.retired if not slots.is_persisting]:
            rank.retired.remove(slots)
            free(slots.slab)

    def give_up_slots(self) -> None:
        """Begin to free all slabs. A trainer that is still connected loses its slots."""
        with self.changed:
            for rank in self.ranks.values():
                slots, rank.slots = rank.slots, None
                if slots is not None:
                    free(slots.slab)

    def is_stuck(self) -> bool:
        """Return whether a shard of a failed save is still being written."""
        return any(slots.is_persisting for rank in self.ranks.values() for slots in rank.all_slots)
