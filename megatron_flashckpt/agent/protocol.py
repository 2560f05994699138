"""Messages between a trainer and its node's agent. `agent.frames` sends and receives them.

The trainer sends requests; the agent sends one reply per request, in order.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from megatron_flashckpt.agent.life import AgentFacts
from megatron_flashckpt.agent.run_messages import AskHeld, BeginRun, Configure, Configured, Held
from megatron_flashckpt.file_format.run_object import RunObject
from megatron_flashckpt.layout.save_cost import RankCost, SaveCost
from megatron_flashckpt.tracing import Span

PROTOCOL_VERSION = 13


class Offer(msgspec.Struct, frozen=True):
    """A complete checkpoint in one slot of one rank."""

    slot: int
    iteration: int
    save_id: str
    durable: bool
    digests: tuple[str, ...] | None
    """Chunk digests, once the agent has read the whole slot."""
    recovered: bool = False
    """The slot came from other nodes; this node does not know whether its save was durable."""


class Outcome(msgspec.Struct, frozen=True):
    """Result of a save."""

    iteration: int
    save_id: str
    error: str | None
    """Reason of a failure, with place and remedy; None: committed."""
    seconds: float
    """Time from staged on this node to committed (or failed); until staged, if it was kept."""
    kept: bool = False
    """True: the save was for host memory only, and all of this rank's part is there."""
    cost: SaveCost | None = None
    """Timings of a committed save, if they are known."""
    failed_ranks: tuple[int, ...] = ()
    """Ranks of this node whose own part has failed; ranks of other nodes may have failed too."""
    lasts: bool = False
    """True if only a person can remove the cause of the failure, as far as this node knows."""
    held: bool = False
    """True: the save failed, and host memory still holds all of it, as far as this node knows."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a connection. Reply: Welcome."""

    rank: int
    protocol: int
    directory: str = ""
    """Identity of the trainer's save directory; empty if the directory does not exist."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    pid: int
    former_pid: int
    """Earlier process of this rank that still runs and is no longer served; 0: none."""
    facts: AgentFacts


class AttachSlab(msgspec.Struct, frozen=True, tag=True):
    """Carries a slab's descriptor; replaces the rank's former slab. Reply: Attached.

    A slab may have unfinished saves of an agent that died; the new agent finishes them.
    """

    formers: tuple[tuple[int, int], ...] = ()
    """Earlier processes of the rank (`RankProcess`) that may still write to the slab."""


class Attached(msgspec.Struct, frozen=True, tag=True):
    taken: tuple[str, ...]
    """Saves staged in the slab, whose results the agent will report."""


class DetachSlab(msgspec.Struct, frozen=True, tag=True):
    """Asks the agent to unmap the rank's slab, which holds no checkpoint. Reply: Done.

    The agent unmaps the slab before it replies, or later if a shard of the slab is being read.
    """


class TakeSlab(msgspec.Struct, frozen=True, tag=True):
    """Asks for the rank's slab after a restart. Reply: SlabOffer, with a descriptor if present."""


class LendSlab(msgspec.Struct, frozen=True, tag=True):
    """Asks for the slab of another rank of this node, to read a save in a load.

    Reply: SlabOffer with the offer of that save and a descriptor, if this agent has that save with
    its digests.
    """

    rank: int
    save_id: str


class SlabOffer(msgspec.Struct, frozen=True, tag=True):
    present: bool
    offers: tuple[Offer, ...]
    formers: tuple[tuple[int, int], ...] = ()
    """Earlier processes of this rank (`RankProcess`) that may write to the slab's other slots."""
    is_digesting: bool = False
    """True if offers without digests will have them soon: send the request again."""
    saves: tuple[tuple[int, str], ...] = ()
    """Iteration and id of every save that any rank has in a slot on this node."""


class OpenRun(msgspec.Struct, frozen=True, tag=True):
    """The rank belongs to this run from now on. Reply: Done.

    Sent when a load is agreed, before the first save of a job that loads nothing, and to every
    agent that replaces another one. Slots that are not of the run's history are emptied, and saves
    that are not of it are given up.
    """

    run: RunObject


class Acquire(msgspec.Struct, frozen=True, tag=True):
    """Requests a slot to stage into; waits up to `wait_s` for one. Reply: Granted."""

    wait_s: float


class Granted(msgspec.Struct, frozen=True, tag=True):
    slot: int
    """-1: all slots are busy."""
    hung_s: float = 0.0
    """Not 0: waiting is useless, because a slot has been written to storage for that long."""


class Staged(msgspec.Struct, frozen=True, tag=True):
    """The slot is complete: the agent persists it, unless it is KEPT. Reply: Done."""

    slot: int
    cost: RankCost | None = None
    spans: tuple[Span, ...] = ()
    """The trainer's phases of the save."""


class GetTemplate(msgspec.Struct, frozen=True, tag=True):
    """Requests a template; waits up to `wait_s` for the rank that computes it.

    Reply: TemplateReply.
    """

    fingerprint: str
    wait_s: float = 0.0


class TemplateReply(msgspec.Struct, frozen=True, tag=True):
    encoded: bytes | None
    computing: bool = False
    """True: another rank is still computing the template; send the request again."""


class PutTemplate(msgspec.Struct, frozen=True, tag=True):
    """Publishes a template for the other ranks of the node. Reply: Done."""

    fingerprint: str
    encoded: bytes


class Poll(msgspec.Struct, frozen=True, tag=True):
    """Asks for unreported results; waits up to `wait_s` while saves are pending.

    Reply: Outcomes.
    """

    wait_s: float = 0.0


class Notice(msgspec.Struct, frozen=True):
    """Text about a save for the people of a job; not its result."""

    iteration: int
    text: str


class Outcomes(msgspec.Struct, frozen=True, tag=True):
    finished: tuple[Outcome, ...]
    pending: int
    notices: tuple[Notice, ...] = ()


class Identity(msgspec.Struct, frozen=True):
    """Key pair of an agent for talking to other agents; the secret key stays on the node."""

    public: str
    secret: str


class OpenPeers(msgspec.Struct, frozen=True, tag=True):
    """Listen for the agents of other nodes. Reply: PeersOpened, equal for all ranks."""

    host: str
    """Address of this node for the others."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    """Threads that encrypt and decrypt."""
    identity: Identity | None = None
    """Identity of a dead agent that this agent replaces, on the same port."""
    port: int | None = None


class PeersOpened(msgspec.Struct, frozen=True, tag=True):
    identity: Identity
    host: str
    port: int
    threads: int


class PeerNode(msgspec.Struct, frozen=True):
    """Address and key of another node's agent."""

    host: str
    port: int
    public: str
    ranks: tuple[int, ...]


class JoinPeers(msgspec.Struct, frozen=True, tag=True):
    """The agents of this job, which are the only ones admitted. Reply: Done."""

    scheme: str
    """`copy` or `xor`."""
    group: int
    timeout_s: float
    me: int
    nodes: tuple[PeerNode, ...]


class EndPeers(msgspec.Struct, frozen=True, tag=True):
    """This run has no `redundancy`: drop held copies and send none. Reply: Done.

    Sent to every agent, because one may have served a run with `redundancy` before.
    """


class Recover(msgspec.Struct, frozen=True, tag=True):
    """Fetch the newest of these saves of this rank from other nodes, if they have them.

    Waits up to `wait_s` for the end. Reply: Recovered. TakeSlab returns the fetched slots.
    """

    saves: tuple[str, ...]
    wait_s: float
    huge_pages: bool
    """Kind of pages for the slots: see `Slab.create`."""


class Recovered(msgspec.Struct, frozen=True, tag=True):
    ended: bool


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The rank ends as planned and will not return. Reply: Done."""


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
    | LendSlab
    | OpenRun
    | Acquire
    | Staged
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
