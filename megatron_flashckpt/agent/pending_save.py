"""State of a save that an agent has a part in and that has no result yet."""

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
#: Records wait for the other ranks of their node for a quarter of the save's time so far, within
#: these bounds in seconds.
_PUBLISH_S = (2.0, 10.0)


@dataclasses.dataclass
class PendingSave:
    """A save that this node has a part in and that has no result yet."""

    storage: Storage
    iteration: int
    save_id: str
    staged_at: float
    metas: dict[int, SlotMeta] = dataclasses.field(default_factory=dict)
    persisted: set[int] = dataclasses.field(default_factory=set)
    """Ranks of this node whose write has ended, with success or failure."""
    unpublished: dict[int, CommitRecord] = dataclasses.field(default_factory=dict)
    """Records of durable shards that are not in storage yet; see `publication`."""
    publish_by: float = 0.0
    """Time at which these records are published without waiting further; `time.monotonic`."""
    publish_again_at: float = 0.0
    """Time of the next attempt to write records after a failure; `time.monotonic`."""
    publish_failures: int = 0
    """Consecutive failures to write records."""
    record_names: set[str] = dataclasses.field(default_factory=set)
    """Record files that this agent has written, tried to write, or found: they may exist."""
    costs: dict[int, RankCost] = dataclasses.field(default_factory=dict)
    """Timings until the slot was staged, by rank of this node."""
    cost: SaveCost | None = None
    """Timings of the committed save."""
    error: str | None = None
    lasts: bool = False
    """Only a person can remove the cause of this node's failure (`error_classes.will_last`)."""
    failed: set[int] = dataclasses.field(default_factory=set)
    """Ranks of this node whose part has failed, perhaps after their record was published."""
    superseded_by: int | None = None
    """Iteration of a save that was staged later and committed earlier."""
    is_abandoned: bool = False
    """Abandoned after a restart: training has resumed from an older save."""
    abandoned_at: float | None = None
    """Time at which the agent began to conclude the abandoned save; `time.monotonic`."""
    given_up: str | None = None
    """Reason of a failure while storage did not answer; any agent may remove the files then."""
    missing: list[int] = dataclasses.field(default_factory=list)
    """Ranks without a commit record at the last look, on the node that commits."""
    listed: set[str] = dataclasses.field(default_factory=set)
    """File names that the committing node has seen in the directory of the save."""
    list_at: float = 0.0
    """Time of the next listing of its directory; `time.monotonic`."""
    list_every_s: float = 0.0
    """See `presence`; 0: not listed yet."""
    unmarked_since: float | None = None
    """Time at which a manifest without this save's marker was first seen; `time.monotonic`."""
    troubled_since: float | None = None
    """Time at which storage began to report transient errors; `time.monotonic`."""
    incomplete_since: float | None = None
    """Time at which shards with records were first missing for the committing agent; same clock."""
    listed_all: bool = False
    """True if the last look has listed the directory."""
    gone_since: float | None = None
    """Time at which published records of this node were first missing; `time.monotonic`."""
    unsent_note: tuple[int, str] | None = None
    """Rank and reason of a failure note that storage had no space for."""
    called_off: bool = False
    """The committing agent has left a note that the save failed."""
    is_noted: bool = False
    """Another node has reported that the save failed."""
    is_final: bool = False
    """The save failed for good: a rank has no part in it, or a later run has the directory."""
    called_slow: bool = False
    """True once its trainers were notified that the save is slow."""
    serves_rank_0: bool = False
    """True if the run's rank 0 was connected to this agent when the save was staged.

    Then no other agent can commit the save, whether or not rank 0 stages its part.
    """
    inherited: bool = False
    """Adopted from another agent: older than all saves that were staged with this agent."""
    later: set[str] = dataclasses.field(default_factory=set)
    """Later saves of the same trainer, if this one was adopted from another agent.

    That agent may have committed them before it died.
    """

    past: PastSave | None = None
    """Result of the save, if it was known before this agent adopted it; see `history.past_save`."""

    staged_as: str = ""
    """Save id in the slots; differs if a failed save is retried under a new id."""

    run: RunKey | None = None
    """The newest run known to the agent when the save was staged; None: no run has claimed."""

    fence: Fence | None = None
    """The agent's fence; None: no other run can overtake it."""
    manifests: KnownManifests = dataclasses.field(default_factory=KnownManifests)
    """The agent's manifest cache."""
    previous: int | None = None
    """Iteration that the tracker named before this save, once it has moved."""

    @property
    def is_decided_here(self) -> bool:
        """Return whether only this agent decides if the save becomes a checkpoint."""
        return 0 in self.metas or self.serves_rank_0

    @property
    def directory(self) -> str:
        return file_names.iteration_dir(self.iteration)

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        # A list in one step: the threads of other trainers add their parts meanwhile.
        return list(self.metas.values())[0].world_size  # noqa: RUF015

    def is_from_before(self, run: RunKey | None) -> bool:
        """Return whether a run without this agent lies between the save's run and `run`."""
        return self.run is not None and run is not None and run.epoch > self.run.epoch + 1

    @property
    def is_of_newest_run(self) -> bool:
        """Return whether no job has started since the agent received the save."""
        return self.fence is None or self.fence.newest == self.run

    @property
    def missed_run(self) -> bool:
        """Return whether no agent commits the save, because a later run ran without this agent."""
        return self.fence is not None and self.is_from_before(self.fence.newest)

    @property
    def awaits_others(self) -> bool:
        """Return whether only the parts of other nodes, or their commit, are missing."""
        is_written = self.persisted >= self.metas.keys() and not self.unpublished
        return is_written and len(self.metas) < self.world_size

    @property
    def needs_no_records(self) -> bool:
        """Return whether further records of this node cannot make the save a checkpoint."""
        return (
            self.error is not None
            or self.given_up is not None
            or self.past is not None
            or self.is_abandoned
        )

    @property
    def missing_records(self) -> list[str]:
        """Return the names of the missing records, assuming that all nodes have as many ranks."""
        own = file_names.runs_of(self.metas)[0]
        return [
            file_names.record_name(ranks.start, self.save_id, len(ranks))
            for run in file_names.runs_of(self.missing)
            for ranks in (run[i : i + len(own)] for i in range(0, len(run), len(own)))
        ]

    def hold_record(self, record: CommitRecord) -> None:
        """Add a record to be published. The caller holds the node's lock."""
        if not self.unpublished:
            now = time.monotonic()
            shortest_s, longest_s = _PUBLISH_S
            waited_s = (now - self.staged_at) / 4
            self.publish_by = now + min(max(waited_s, shortest_s), longest_s)
        self.unpublished[record.rank] = record

    @property
    def order(self) -> tuple[bool, float]:
        """Return a sort key; smaller for a save that was staged earlier."""
        return not self.inherited, self.iteration if self.inherited else self.staged_at


def wait_reason(save: PendingSave) -> str:
    """Return what `save` is waiting for, as far as is known without asking storage."""
    writing = sorted(set(save.metas) - save.persisted)
    if writing:
        plural = "s" if len(writing) > 1 else ""
        return (
            f"the shards of {len(writing)} rank{plural} "
            f"({', '.join(map(str, writing[:_SHOWN]))}) are still being written: "
            f"{save.storage.place} is slow, or hangs"
        )
    if save.unpublished:
        return f"the commit records of this node cannot be written: {save.storage.place} is slow"
    if 0 not in save.metas:
        return f"{file_names.MANIFEST} from the node of rank 0 is missing"
    if not save.missing:
        return f"{save.storage.place} does not answer"
    return (
        f"the commit records of {len(save.missing)} of {save.metas[0].world_size} ranks are "
        f"missing ({', '.join(save.missing_records[:_SHOWN])})"
    )


def gave_up(save: PendingSave, timeout_s: float) -> str:
    """Return the error of a save that was not committed in time."""
    return (
        f"{save.storage.place}/{save.directory}: gave up after {timeout_s:.0f} s: "
        f"{wait_reason(save)}; look at that storage and at the agent logs of the nodes of these "
        "ranks, or raise 'agent.commit_timeout_s'"
    )
