"""Messages between a trainer and its node's agent. `agent.frames` sends and receives them.

The trainer asks, the agent answers: one reply per request, in order.
"""

from __future__ import annotations

import msgspec

from megatron_flashckpt.agent.life import AgentFacts
from megatron_flashckpt.agent.run_messages import AskHeld, BeginRun, Configure, Configured, Held
from megatron_flashckpt.layout.save_cost import RankCost, SaveCost
from megatron_flashckpt.tracing import Span

PROTOCOL_VERSION = 9


class Offer(msgspec.Struct, frozen=True):
    """A complete checkpoint in one slot of one rank."""

    slot: int
    iteration: int
    save_id: str
    durable: bool
    digests: tuple[str, ...] | None
    """Chunk digests, once the agent has read the slot: to persist it, or to vouch for it."""
    recovered: bool = False
    """It came from other nodes: nobody here knows whether it was ever durable."""
    committed: int = -1
    """Iteration of the newest checkpoint that the agent knows to be in storage; -1: of none."""
    lineage: tuple[str, ...] = ()
    """Saves that this one continues: the newest that the agent saw committed, and the one that
    training resumed from (empty if from none). Nothing: the agent was told of neither."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of a save."""

    iteration: int
    save_id: str
    error: str | None
    """None: committed. Else why not, with place and remedy."""
    seconds: float
    """From staged on this node to committed (or given up)."""
    kept: bool = False
    """It was for host memory only, and is there."""
    cost: SaveCost | None = None
    """Of a committed save, if it is known."""
    differing: tuple[str, ...] = ()
    compared: bool = False
    """What the manifest of a committed save says of copies."""
    failed_ranks: tuple[int, ...] = ()
    """Ranks of this node whose own part has failed; others may have failed elsewhere."""
    lasts: bool = False
    """Only a person can end the reason of the failure, as far as this node knows it."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a connection. Reply: Welcome."""

    rank: int
    protocol: int
    directory: str = ""
    """Which directory the save directory is for the trainer; empty if it does not exist."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    pid: int
    root: str
    former_pid: int = 0
    """Earlier process of this rank that still runs, and that is served no more; 0: none."""
    facts: AgentFacts | None = None


class AttachSlab(msgspec.Struct, frozen=True, tag=True):
    """Carries a slab's descriptor; replaces the rank's former slab. Reply: Attached.

    A slab that outlived its agent may hold what that agent did not end: its successor does.
    """

    is_former: bool = False
    """It is that of an earlier process of the rank, which may still write to it."""


class Attached(msgspec.Struct, frozen=True, tag=True):
    taken: tuple[str, ...]
    """Saves staged in the slab, whose outcome will be told."""


class DetachSlab(msgspec.Struct, frozen=True, tag=True):
    """Asks the agent to unmap the rank's slab, which holds no checkpoint. Reply: Done.

    The agent unmaps the slab before it replies, unless a shard of the slab is still being read.
    """


class TakeSlab(msgspec.Struct, frozen=True, tag=True):
    """After a restart. Reply: SlabOffer, with the slab's descriptor if there is one."""


class SlabOffer(msgspec.Struct, frozen=True, tag=True):
    present: bool
    offers: tuple[Offer, ...]
    read_only: bool = False
    """An earlier process of this rank still runs and may write to the slab's other slots."""
    is_digesting: bool = False
    """True if offers without digests will have them soon: ask again."""
    saves: tuple[tuple[int, str], ...] = ()
    """Iteration and id of every save that any rank has in a slot on this node."""


class Hold(msgspec.Struct, frozen=True, tag=True):
    """The rank is of this run, which claims the save directory. Reply: Done. See `agent.claim`."""

    epoch: int
    run_id: str


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """Training goes on from this save (None: from no slot). Reply: Done.

    Slots of other saves that are newer belong to a past that did not happen: they are emptied, so
    that a later restart cannot pick them.
    """

    save_id: str | None
    iteration: int


class Acquire(msgspec.Struct, frozen=True, tag=True):
    """Wants a slot to stage into; waits up to `wait_s` for one. Reply: Granted."""

    iteration: int
    save_id: str
    wait_s: float = 0.0


class Granted(msgspec.Struct, frozen=True, tag=True):
    slot: int
    """-1: all are busy."""
    hung_s: float = 0.0
    """Not 0: there is nothing to wait for; a slot has been written to storage for that long."""


class Staged(msgspec.Struct, frozen=True, tag=True):
    """The slot is complete: persist it, or (KEPT) take care of it as it is. Reply: Done."""

    slot: int
    cost: RankCost | None = None
    spans: tuple[Span, ...] = ()
    """What the save has done so far."""


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """This rank has no part in a save that others may wait for: let it fail now. Reply: Done."""

    iteration: int
    save_id: str
    reason: str


class GetTemplate(msgspec.Struct, frozen=True, tag=True):
    """Wants a template; waits up to `wait_s` for a rank that computes it. Reply: TemplateReply."""

    fingerprint: str
    wait_s: float = 0.0


class TemplateReply(msgspec.Struct, frozen=True, tag=True):
    encoded: bytes | None
    computing: bool = False
    """True: another rank is still computing the template; ask again."""


class PutTemplate(msgspec.Struct, frozen=True, tag=True):
    """Reply: Done."""

    fingerprint: str
    encoded: bytes


class Poll(msgspec.Struct, frozen=True, tag=True):
    """Asks for outcomes not told yet; waits up to `wait_s` while saves are pending.

    Reply: Outcomes.
    """

    wait_s: float = 0.0
    spans: dict[str, tuple[Span, ...]] = {}
    """By save, what it has done since its doorbell was rung."""


class Notice(msgspec.Struct, frozen=True):
    """What the people of a job should know of a save that has no outcome yet."""

    iteration: int
    text: str


class Outcomes(msgspec.Struct, frozen=True, tag=True):
    finished: tuple[Outcome, ...]
    pending: int
    notices: tuple[Notice, ...] = ()


class Identity(msgspec.Struct, frozen=True):
    """An agent's key pair for talking to other agents; the secret one never leaves the node."""

    public: str
    secret: str


class OpenPeers(msgspec.Struct, frozen=True, tag=True):
    """Listen for the agents of other nodes. Reply: PeersOpened, the same to every rank."""

    host: str
    """Address of this node that the others reach."""
    threads: int
    """That encrypt and decrypt."""
    identity: Identity | None = None
    """To take the place of an agent that is gone, and of its port."""
    port: int | None = None


class PeersOpened(msgspec.Struct, frozen=True, tag=True):
    identity: Identity
    host: str
    port: int
    threads: int


class PeerNode(msgspec.Struct, frozen=True):
    """How other nodes reach an agent, and know it."""

    host: str
    port: int
    public: str
    ranks: tuple[int, ...]


class JoinPeers(msgspec.Struct, frozen=True, tag=True):
    """The agents of this job: let them in, and nobody else. Reply: Done."""

    scheme: str
    """`copy` or `xor`."""
    group: int
    timeout_s: float
    me: int
    nodes: tuple[PeerNode, ...]


class EndPeers(msgspec.Struct, frozen=True, tag=True):
    """This run has no `redundancy`: hold and send nothing any more. Reply: Done.

    To an agent that has outlived a run that had.
    """


class Recover(msgspec.Struct, frozen=True, tag=True):
    """Get the newest of these saves of this rank back from other nodes, as far as they have them.

    Waits up to `wait_s` for the end of it. Reply: Recovered. TakeSlab tells what came of it.
    """

    saves: tuple[str, ...]
    wait_s: float
    huge_pages: bool
    """Of what the slots shall consist: see `Slab.create`."""


class Recovered(msgspec.Struct, frozen=True, tag=True):
    ended: bool


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The rank ends as planned and will not be back. Reply: Done."""


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request could not be served."""

    reason: str


Request = (
    Hello
    | AttachSlab
    | DetachSlab
    | TakeSlab
    | Hold
    | Adopt
    | Acquire
    | Staged
    | Abandon
    | GetTemplate
    | PutTemplate
    | Poll
    | OpenPeers
    | JoinPeers
    | EndPeers
    | Recover
    | Configure
    | BeginRun
    | AskHeld
    | Leave
)
Reply = (
    Welcome
    | Attached
    | SlabOffer
    | Granted
    | TemplateReply
    | Outcomes
    | PeersOpened
    | Recovered
    | Configured
    | Held
    | Done
    | Refused
)

decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
