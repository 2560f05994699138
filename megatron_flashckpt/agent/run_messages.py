"""Messages about a run as a whole: its settings, its ranks, and memory of earlier runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from megatron_flashckpt.agent.settings import AgentSettings
from megatron_flashckpt.memory.host_memory import shown

#: Ranks that a message lists at most.
_SHOWN = 8


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The settings of this run; an agent that an earlier run started takes them. Reply: Configured.

    Sent after Hello. The run that came last decides.
    """

    settings: AgentSettings


class Configured(msgspec.Struct, frozen=True, tag=True):
    changed: tuple[str, ...]
    """Each setting that was another one before, with both values."""


class BeginRun(msgspec.Struct, frozen=True, tag=True):
    """This rank has loaded, and belongs to a run. Reply: Done.

    When all ranks of the run on this node have said so, the agent frees the memory of others.
    """

    run_id: str
    ranks: tuple[int, ...]
    """Ranks of the run on this node."""


class AskHeld(msgspec.Struct, frozen=True, tag=True):
    """Asks whose memory the agent holds. Reply: Held.

    Waits up to `wait_s` until the memory of ranks that are not of the run is freed.
    """

    wait_s: float


class HeldSlab(msgspec.Struct, frozen=True):
    """Memory of one rank that an agent keeps."""

    rank: int
    nbytes: int
    iteration: int
    """The newest complete checkpoint in it; -1: there is none."""
    durable: bool
    departed: bool
    """The rank is not of the run on this node."""
    in_use: bool
    """It is being written to storage, or its save has no outcome yet."""


class Held(msgspec.Struct, frozen=True, tag=True):
    slabs: tuple[HeldSlab, ...]


def whose(slabs: Sequence[HeldSlab]) -> str:
    """Return how much memory slabs take, and for which rank and save each."""
    total = sum(slab.nbytes for slab in slabs)
    listed = [_described(slab) for slab in slabs[:_SHOWN]]
    if len(slabs) > _SHOWN:
        listed.append(f"{len(slabs) - _SHOWN} more")
    return f"{shown(total)}: {', '.join(listed)}"


def _described(slab: HeldSlab) -> str:
    facts = [f"iteration {slab.iteration}" if slab.iteration >= 0 else "no checkpoint"]
    if slab.in_use:
        facts.append("being written")
    elif slab.iteration >= 0:
        facts.append("in storage" if slab.durable else "not in storage")
    if slab.departed:
        facts.append("of an earlier run")
    return f"{shown(slab.nbytes)} of rank {slab.rank} ({', '.join(facts)})"
