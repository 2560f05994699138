"""The end of one save on one node: a state machine without input, output, clock or thread.

A save has one name for its end (`file_names.end_name`). Whoever creates it first decides: only a
node that holds rank 0's part and has read the records of all ranks proposes a manifest; any node
may propose that the save failed. After every create the name is read back and obeyed. So nodes
differ in what they may propose, and never need to know what another node does at the moment.

`CommitCore.note` takes an observation; `CommitCore.next` returns the next action. The driver
(`committer.py`) carries it out and notes what it saw.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import NamedTuple

from megatron_flashckpt.errors import first_few
from megatron_flashckpt.file_format.commit_record import CommitRecord
from megatron_flashckpt.file_format.end import End, Failure
from megatron_flashckpt.layout.save_cost import SaveCost
from megatron_flashckpt.storage.store import Pace

#: Seconds for which the node of rank 0 retries storage errors that may pass, so that a dead disk
#: does not block slots for the whole commit timeout. Other nodes wait for its decision.
PATIENCE_S = 20.0
#: Records wait for the other ranks of their node, to share a file, for a quarter of the save's time
#: so far, within these bounds in seconds.
_PUBLISH_S = (2.0, 10.0)
#: First and longest pause after an error that may pass, in seconds.
_RETRY_S = (0.5, 8.0)
#: Seconds for which an end is proposed against an error that does not pass.
_LASTING_S = 5.0


# ---------------------------------------------------------------------- observations


@dataclasses.dataclass(frozen=True)
class Joined:
    """A rank of this node has a part in the save."""

    rank: int
    is_adopted: bool = False
    """True if another agent may have created the record: it had the slot, or wrote the shard."""


@dataclasses.dataclass(frozen=True)
class Durable:
    """The shard of a rank, which the record describes, is durable."""

    record: CommitRecord


@dataclasses.dataclass(frozen=True)
class GivenUp:
    """The save is to fail: a part cannot be written, or training went on without the save."""

    failure: Failure


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The records of these ranks are in storage."""

    ranks: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Looked:
    """The save has no end yet, as this node sees it."""

    records: Mapping[str, range] = dataclasses.field(default_factory=dict)
    """Names and ranks of the records, of all nodes, that were listed."""


@dataclasses.dataclass(frozen=True)
class Missing:
    """A record that a listing has shown is not there."""

    name: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end exists and was read."""

    end: End
    failure: Failure | None = None
    is_durable: bool = False
    """True if this node has created the name or made it durable, so a power loss spares it."""
    cost: SaveCost | None = None
    """Timings of the save, on the node that proposed a manifest."""


@dataclasses.dataclass(frozen=True)
class Unseen:
    """Shards with records are not visible, nor is an end. They may come late, or were removed."""

    text: str


@dataclasses.dataclass(frozen=True)
class Trouble:
    """The action raised an error; it may have taken effect."""

    text: str
    may_pass: bool
    lasts: bool = False
    """True if only a person can remove the cause."""


Observation = Joined | Durable | GivenUp | Recorded | Looked | Missing | Ended | Unseen | Trouble


# ---------------------------------------------------------------------- actions


@dataclasses.dataclass(frozen=True)
class Wait:
    """Nothing to do before this time, unless something is observed."""

    until: float


@dataclasses.dataclass(frozen=True)
class WriteRecords:
    """Create these records. Answer: `Recorded` or `Trouble`."""

    records: tuple[CommitRecord, ...]


@dataclasses.dataclass(frozen=True)
class Look:
    """Ask for the end by name; list the records, too, if `records`.

    Answer: `Ended`, `Looked` or `Trouble`.
    """

    records: bool


@dataclasses.dataclass(frozen=True)
class Commit:
    """Propose a manifest, from the records of all ranks, if every shard is there.

    Answer: `Ended`, `Missing`, `Unseen` or `Trouble`.
    """

    names: frozenset[str]
    """Names of the records."""


@dataclasses.dataclass(frozen=True)
class Fail:
    """Propose that the save failed.

    A full disk has no room for the end: then delete the shards of the ranks in `discarded` first,
    if the save has no end yet. This agent has proposed no record of them. Answer: `Ended` or
    `Trouble`.
    """

    failure: Failure
    discarded: frozenset[int]


@dataclasses.dataclass(frozen=True)
class MakeDurable:
    """Make the name of the end, which another agent has created, survive a power loss.

    Answer: the same `Ended`, which is durable, or `Trouble`.
    """

    ended: Ended


@dataclasses.dataclass(frozen=True)
class Conclude:
    """The save is over on this node: tell the trainers and free the slots. The last action."""

    end: End | None
    """The end as it was read. None: storage has not answered, so nothing may be removed."""
    failure: Failure | None


Action = Wait | WriteRecords | Look | Commit | Fail | MakeDurable | Conclude


@dataclasses.dataclass(frozen=True)
class Trainers:
    """Ranks of this node by whether their process is connected to the agent."""

    connected: frozenset[int] = frozenset()
    """These ranks will stage their part soon."""
    gone: frozenset[int] = frozenset()
    """Ranks whose processes of the save's run were connected, and have ended."""


class _Outage(NamedTuple):
    """Errors of storage without an answer between them."""

    since: float
    last: Trouble


class CommitCore:
    """One save on one node. Not thread-safe.

    Args:
        place: the save's directory, for messages.
        world_size: number of ranks of the job.
        staged_at: when the first rank of this node had its part in host memory.
        timeout_s: seconds after which this node proposes that the save failed.
        pace: the store's; nodes that wait keep to it.
    """

    def __init__(
        self, place: str, world_size: int, staged_at: float, timeout_s: float, pace: Pace
    ) -> None:
        self.ranks: set[int] = set()
        self.durable: dict[int, CommitRecord] = {}
        """Records of the durable shards, by rank."""
        self.place = place
        self.world_size = world_size
        self.staged_at = staged_at
        self.timeout_s = timeout_s
        self._pace = pace
        #: Ranks whose records may be in storage: a create that raised, or one of an agent that was
        #: killed, may have taken effect.
        self._proposed: set[int] = set()
        self._recorded: set[int] = set()
        self._publish_by: float | None = None
        #: Names and ranks of the records, of all nodes, that listings have shown, unless a read did
        #: not find them; only on the node of rank 0. A later listing may lack them.
        self._listed: dict[str, range] = {}
        #: Names of all records that listings have ever shown.
        self._seen: set[str] = set()
        #: The end; before it is known, the failure that this node proposes.
        self._verdict: Ended | Failure | None = None
        self._next_at = staged_at
        self._pause_s = pace.shortest_s
        self._unseen_since: float | None = None
        self._outage: _Outage | None = None

    # ------------------------------------------------------------------ for others

    @property
    def is_over(self) -> bool:
        """Return whether further shards of this node are useless."""
        return self._verdict is not None

    @property
    def end(self) -> Ended | None:
        """Return the end; None while it is not known."""
        return self._verdict if isinstance(self._verdict, Ended) else None

    @property
    def has_failed(self) -> bool:
        """Return whether the end is known, and is no manifest: files may be removed."""
        return self.end is not None and self.end.end is End.FAILED

    @property
    def ended_elsewhere(self) -> bool:
        """Return whether another agent has decided the end."""
        return self.end is not None and not self.end.is_durable

    @property
    def cost(self) -> SaveCost | None:
        """Return the timings of the save, if this node has proposed a manifest."""
        return None if self.end is None else self.end.cost

    @property
    def holds_rank_0(self) -> bool:
        """Return whether this node may propose a manifest."""
        return 0 in self.ranks

    @property
    def awaits_others(self) -> bool:
        """Return whether only the parts of other nodes, or their commit, are missing."""
        return self.ranks <= self._recorded and len(self.ranks) < self.world_size

    def waits_for(self) -> str:
        """Return what the save is waiting for, as far as this node knows."""
        writing = sorted(self.ranks - self.durable.keys())
        if writing:
            plural = "s" if len(writing) > 1 else ""
            return (
                f"the shards of {len(writing)} rank{plural} ({first_few(writing)}) are still being "
                f"written: {self.place} is slow, or hangs"
            )
        if self._outage is not None:
            return f"storage does not answer as it should: {self._outage.last.text}"
        if not self.ranks <= self._recorded:
            return f"the commit records of this node cannot be written: {self.place} is slow"
        if not self.holds_rank_0:
            return "its end, from the node of rank 0, is missing"
        missing = sorted(set(range(self.world_size)) - self._listed_ranks())
        if not missing:
            return f"{self.place} does not answer"
        return (
            f"the commit records of {len(missing)} of {self.world_size} ranks "
            f"({first_few(missing)}) are missing"
        )

    # ------------------------------------------------------------------ the machine

    def note(self, now: float, seen: Observation) -> None:
        """Take an observation.

        Args:
            now: seconds of a clock that is never set.
        """
        if not isinstance(seen, (Trouble, Joined, Durable, GivenUp)):
            self._outage = None  # storage has answered
        match seen:
            case Joined(rank, is_adopted):
                self.ranks.add(rank)
                if is_adopted:
                    self._proposed.add(rank)
            case Durable(record):
                self.durable[record.rank] = record
                if self._publish_by is None:
                    shortest_s, longest_s = _PUBLISH_S
                    waited_s = (now - self.staged_at) / 4
                    self._publish_by = now + min(max(waited_s, shortest_s), longest_s)
            case GivenUp(failure):
                self._verdict = self._verdict or failure
            case Recorded(ranks):
                self._recorded |= ranks
                self._publish_by = None
            case Looked(records):
                # A record that no read finds stays in late listings, and is no news.
                if not records.keys() <= self._seen:
                    self._pause_s = self._pace.shortest_s
                self._seen |= records.keys()
                self._listed |= records
            case Missing(name):
                del self._listed[name]
            case Ended() if self.end is None or seen.is_durable:
                self._verdict = seen
            case Unseen(text):
                self._unseen_since = self._unseen_since or now
                if now - self._unseen_since > PATIENCE_S:
                    self._verdict = self._verdict or Failure(failed=text)
            case Trouble():
                self._note_trouble(now, seen)
        if isinstance(seen, (Looked, Missing, Unseen)):
            # Other nodes have as many ranks as this one, give or take.
            nodes = self.world_size / max(len(self.ranks), 1)
            self._next_at = now + max(self._pause_s, nodes / self._pace.most_per_s)
            self._pause_s = min(2 * self._pause_s, self._pace.longest_s)
        elif self._outage is None:
            self._next_at, self._pause_s = now, self._pace.shortest_s

    def _note_trouble(self, now: float, trouble: Trouble) -> None:
        if self._outage is None:
            self._outage, self._pause_s = _Outage(now, trouble), _RETRY_S[0]
        self._outage = self._outage._replace(last=trouble)
        self._next_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RETRY_S[1])
        if not self.ranks <= self.durable.keys():
            return  # the errors of its shards say which ranks have failed
        if self.awaits_others and not self.holds_rank_0:
            return  # the node of rank 0 decides, and storage may answer it
        is_long = self.holds_rank_0 and now - self._outage.since > PATIENCE_S
        if not trouble.may_pass or is_long:
            self._verdict = self._verdict or Failure(failed=trouble.text, lasts=trouble.lasts)

    def next(self, now: float, trainers: Trainers) -> Action:
        """Return what to do next; only the driver calls this, and reports what it saw to `note`."""
        has_expired = now - self.staged_at > self.timeout_s
        if has_expired and self._verdict is None:
            is_final = self.awaits_others and self._outage is None
            self._verdict = Failure(failed=self.gave_up(), is_final=is_final)
        if missing := self._never_staged(trainers):
            # A rank without a part has no record, so no node can make a checkpoint of the save.
            reason = (
                f"rank {first_few(missing)} ended before its part of the save was in host memory"
            )
            self._verdict = self._verdict or Failure(
                failed=reason, is_final=True, was_interrupted=True
            )
        is_given_up = self._is_given_up(now, has_expired=has_expired)
        match self._verdict:
            case Ended() as ended if ended.is_durable or not self.holds_rank_0 or is_given_up:
                return Conclude(ended.end, ended.failure)
            case Failure() as failure if is_given_up:
                return Conclude(None, failure)
            case _ if now < self._next_at:
                return Wait(self._next_at)
            case Ended() as ended:
                return MakeDurable(ended)
            case Failure() as failure:
                return Fail(failure, frozenset(self.durable.keys() - self._proposed))
        unrecorded = self.durable.keys() - self._recorded
        if unrecorded and (self._all_durable(trainers) or now >= (self._publish_by or now)):
            self._proposed |= unrecorded
            return WriteRecords(tuple(self.durable[rank] for rank in sorted(unrecorded)))
        if len(self._listed_ranks()) == self.world_size:
            return Commit(frozenset(self._listed))
        return Look(records=self.holds_rank_0 and self.ranks <= self._recorded)

    def _listed_ranks(self) -> set[int]:
        return set(itertools.chain.from_iterable(self._listed.values()))

    def _all_durable(self, trainers: Trainers) -> bool:
        """Return whether no rank of this node will need a record of its own soon."""
        awaited = {rank for rank in trainers.connected if rank < self.world_size}
        return self.ranks | awaited <= self.durable.keys()

    def _never_staged(self, trainers: Trainers) -> list[int]:
        """Return the ranks of this node whose part nobody can stage any more.

        All processes of the node have ended: a single one may come back to the agent.
        """
        if trainers.connected or self.end is not None:
            return []
        return sorted(rank for rank in trainers.gone - self.ranks if rank < self.world_size)

    def _is_given_up(self, now: float, *, has_expired: bool) -> bool:
        """Return whether storage has failed for so long that this node does not wait for the end.

        The end may exist. So nothing is removed, and a later commit closes the save. If the end is
        known, only its durability is not.
        """
        if self._outage is None or self._verdict is None:
            return False
        patience_s = 2 * PATIENCE_S if self._outage.last.may_pass else _LASTING_S
        return has_expired or now - self._outage.since > patience_s

    def gave_up(self) -> str:
        """Return the error of a save that was not committed in time."""
        return (
            f"{self.place}: gave up after {self.timeout_s:.0f} s: {self.waits_for()}; look at "
            "that storage and at the agent logs of the nodes of these ranks, or raise "
            "'agent.commit_timeout_s'"
        )
