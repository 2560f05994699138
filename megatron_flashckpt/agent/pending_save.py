"""A save that an agent has a part in and whose outcome is open, and what it waits for."""

from __future__ import annotations

import dataclasses
import time

from megatron_flashckpt.agent.claim import RunKey
from megatron_flashckpt.agent.fence import Fence
from megatron_flashckpt.catalog.history import PastSave
from megatron_flashckpt.catalog.manifest_facts import KnownManifests
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import CommitRecord
from megatron_flashckpt.layout.save_cost import RankCost, SaveCost
from megatron_flashckpt.memory.slot import SlotMeta
from megatron_flashckpt.storage.base import Storage

_SHOWN = 8
#: Records of ranks wait for the other ranks of their node for a quarter of the time that the save
#: has taken by then, within these bounds in seconds.
_PUBLISH_S = (2.0, 10.0)


@dataclasses.dataclass
class PendingSave:
    """A save that this node has a part in and whose outcome is open."""

    storage: Storage
    iteration: int
    save_id: str
    staged_at: float
    metas: dict[int, SlotMeta] = dataclasses.field(default_factory=dict)
    persisted: set[int] = dataclasses.field(default_factory=set)
    """Ranks of this node whose write has ended, well or not."""
    unpublished: dict[int, CommitRecord] = dataclasses.field(default_factory=dict)
    """Records of durable shards that are not in storage yet; see `publication`."""
    publish_by: float = 0.0
    """When these records are published, whatever other ranks do; `time.monotonic`."""
    publish_again_at: float = 0.0
    """When records whose put has failed are put again; `time.monotonic`."""
    publish_failures: int = 0
    """Failures of the last put, one after the other."""
    record_names: set[str] = dataclasses.field(default_factory=set)
    """Record files that this agent has put, tried to put, or found: they may be there."""
    costs: dict[int, RankCost] = dataclasses.field(default_factory=dict)
    """What it took until it was staged, by rank of this node."""
    cost: SaveCost | None = None
    """What it took in all, once it is committed."""
    differing: tuple[str, ...] = ()
    compared: bool = False
    """What its manifest says of copies, once it is committed."""
    error: str | None = None
    lasts: bool = False
    """Only a person can end what this node has failed at (`error_classes.will_last`)."""
    failed: set[int] = dataclasses.field(default_factory=set)
    """Ranks of this node whose part has failed. A rank may have published its record before."""
    superseded_by: int | None = None
    """Iteration of a save that was staged later and committed earlier."""
    outlived: bool = False
    """A crash cut it short, and training has gone on from an older one: nobody will complete it."""
    abandoned_at: float | None = None
    """When the agent began to conclude it for that reason; `time.monotonic`."""
    given_up: str | None = None
    """Why it was concluded while storage did not answer. It never becomes a checkpoint after that:
    its files are anybody's to remove."""
    missing: list[int] = dataclasses.field(default_factory=list)
    """Ranks without a commit record when last looked for, on the node that commits."""
    listed: set[str] = dataclasses.field(default_factory=set)
    """File names that the committing node has seen in the directory of the save."""
    list_at: float = 0.0
    """When its directory is to be listed next; `time.monotonic`."""
    list_every_s: float = 0.0
    """See `presence`; 0: it was not listed yet."""
    unmarked_since: float | None = None
    """When a manifest without this save's marker was seen first; `time.monotonic`."""
    troubled_since: float | None = None
    """When storage began to report errors which may pass; `time.monotonic`."""
    listed_all: bool = False
    """Whether the last look at the directory has listed it."""
    gone_since: float | None = None
    """When records that this node has published were first not there; `time.monotonic`."""
    untold: tuple[int, str] | None = None
    """A failure that storage had no room for a note of: the rank in whose name, and the reason."""
    called_off: bool = False
    """The committing agent has left a note that the save failed."""
    called_slow: bool = False
    """Its trainers were told that it takes long."""
    serves_rank_0: bool = False
    """Rank 0 of its run was connected to this agent when it was given the save: no other agent can
    commit it, whether rank 0 stages its part or not."""
    inherited: bool = False
    """Taken over from another agent: staged before all that this one was given by a doorbell."""
    later: set[str] = dataclasses.field(default_factory=set)
    """Saves that the same trainer staged later, where this one was taken over from another agent,
    which may have committed them before it went."""

    past: PastSave | None = None
    """How it went, if that was known before this agent got to it. See `history.told_of`."""

    staged_as: str = ""
    """The id that its slots have: another one if it failed before, and is written after all."""

    run: RunKey | None = None
    """The newest run that the agent knew when it was given the save; None: no run has claimed."""

    fence: Fence | None = None
    """Of the agent, which may have been overtaken by another run; None: there is no other."""
    manifests: KnownManifests = dataclasses.field(default_factory=KnownManifests)
    """Of the agent."""
    previous: int | None = None
    """What the tracker named before this save, once it has moved."""

    @property
    def is_decided_here(self) -> bool:
        """Return whether this agent alone decides if the save becomes a checkpoint."""
        return 0 in self.metas or self.serves_rank_0

    @property
    def directory(self) -> str:
        return file_names.iteration_dir(self.iteration)

    def is_from_before(self, run: RunKey | None) -> bool:
        """Return whether a run that this agent had no part in lies between the save and `run`."""
        return self.run is not None and run is not None and run.epoch > self.run.epoch + 1

    @property
    def is_of_newest_run(self) -> bool:
        """Return whether no job has started since the agent was given the save."""
        return self.fence is None or self.fence.newest == self.run

    @property
    def missed_a_run(self) -> bool:
        """Return whether nobody commits the save, because this agent had no part in a later run."""
        return self.fence is not None and self.is_from_before(self.fence.newest)

    @property
    def is_moot(self) -> bool:
        """Return whether nothing that this node publishes can make the save a checkpoint."""
        return (
            self.error is not None
            or self.given_up is not None
            or self.past is not None
            or self.outlived
        )

    @property
    def missing_records(self) -> list[str]:
        """Return the names that the missing records have if all nodes have as many ranks."""
        own = file_names.runs_of(self.metas)[0]
        return [
            file_names.record_name(it.start, self.save_id, len(it))
            for run in file_names.runs_of(self.missing)
            for it in (run[i : i + len(own)] for i in range(0, len(run), len(own)))
        ]

    def hold_record(self, record: CommitRecord) -> None:
        """Note a record that is to be published. The node's lock is held."""
        if not self.unpublished:
            now = time.monotonic()
            shortest_s, longest_s = _PUBLISH_S
            waited_s = (now - self.staged_at) / 4
            self.publish_by = now + min(max(waited_s, shortest_s), longest_s)
        self.unpublished[record.rank] = record

    @property
    def order(self) -> tuple[bool, float]:
        """Smaller if it was staged earlier."""
        return not self.inherited, self.iteration if self.inherited else self.staged_at


def awaited_by(save: PendingSave) -> str:
    """Return what `save` waits for, as far as is known without asking storage."""
    writing = sorted(set(save.metas) - save.persisted)
    if writing:
        return (
            f"the shards of {len(writing)} ranks ({', '.join(map(str, writing[:_SHOWN]))}) are "
            f"still being written: {save.storage.place} is slow, or hangs"
        )
    if save.unpublished:
        return f"the commit records of this node cannot be put: {save.storage.place} is slow"
    if 0 not in save.metas:
        return f"{file_names.MANIFEST} from the node of rank 0 is not there"
    if not save.missing:
        return f"{save.storage.place} does not answer"
    return (
        f"the commit records of {len(save.missing)} of {save.metas[0].world_size} ranks are not "
        f"there ({', '.join(save.missing_records[:_SHOWN])})"
    )


def gave_up(save: PendingSave, timeout_s: float) -> str:
    """Return why a save failed that nothing came of in time."""
    return (
        f"{save.storage.place}/{save.directory}: gave up after {timeout_s:.0f} s: "
        f"{awaited_by(save)}; look at that storage and at the agent logs of the nodes of these "
        "ranks, or raise 'agent.commit_timeout_s'"
    )
