"""Messages about a run as a whole: its settings, its ranks, and memory of earlier runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from megatron_flashckpt.agent.settings import AgentSettings
from megatron_flashckpt.memory.host_memory import shown

#: Upper bound of the ranks in a message.
_SHOWN = 8


class Configure(msgspec.Struct, frozen=True, tag=True):
    """Settings of this run, which an agent of an earlier run applies. Reply: Configured.

    Sent after Hello. The last run decides.
    """

    settings: AgentSettings
    of_stores: dict[str, str] | None = None
    """Environment variables for object stores; None: the save directory is a directory."""


class Configured(msgspec.Struct, frozen=True, tag=True):
    changed: tuple[str, ...]
    """Each changed setting, with both values."""


class BeginRun(msgspec.Struct, frozen=True, tag=True):
    """This rank has loaded, and belongs to a run. Reply: Done.

    When all ranks of the run on this node have sent it, the agent frees the memory of other ranks.
    """

    run_id: str
    ranks: tuple[int, ...]
    """Ranks of the run on this node."""


class AskHeld(msgspec.Struct, frozen=True, tag=True):
    """Asks for the slabs that the agent holds. Reply: Held.

    Waits up to `wait_s` until the memory of ranks outside the run is freed.
    """

    wait_s: float


class HeldSlab(msgspec.Struct, frozen=True):
    """Memory of one rank that an agent keeps."""

    rank: int
    nbytes: int
    iteration: int
    """The newest complete checkpoint in the slab; -1: none."""
    durable: bool
    departed: bool
    """The rank is not of the run on this node."""
    in_use: bool
    """The slab is being written to storage, or its save has no result yet."""


class Held(msgspec.Struct, frozen=True, tag=True):
    slabs: tuple[HeldSlab, ...]


def describe_slabs(slabs: Sequence[HeldSlab]) -> str:
    """Return the total size of slabs, and size, rank and save of the first ones."""
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
