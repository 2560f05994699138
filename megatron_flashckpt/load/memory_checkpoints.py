"""The checkpoints that all ranks hold in their slots, as their agents offer them."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.collectives import gathered
from megatron_flashckpt.failpoints import reach
from megatron_flashckpt.load.offers import common_saves, lacking_ranks, newest_saves
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save.checkpointer import Checkpointer


@dataclasses.dataclass(frozen=True)
class InMemory:
    """A checkpoint that every rank holds in a slot, with this rank's slab and slot offer."""

    slab: Slab
    offer: Offer
    committed: int
    """Newest committed iteration that agents know of; -1 if they know of none."""
    lineage: frozenset[str] = frozenset()
    """Ancestors of this save that agents know of; see `protocol.Offer`."""


def held_in_memory(checkpointer: Checkpointer) -> list[InMemory]:
    """Return the checkpoints that *all* ranks hold, newest first. Collective.

    With `redundancy`, ranks whose node was lost, and ranks that are on another node than before,
    first get back what the other nodes still hold of them.
    """
    link, config = checkpointer.link, checkpointer.config
    is_redundant = config.redundancy != "none"
    if is_redundant:
        checkpointer.start_run()

    def taken() -> tuple[_Taken, tuple[list[dict[str, Any]], tuple[tuple[int, str], ...]]]:
        own, told = _told(link.take_slab())
        # If all ranks are on other nodes than before, no rank has an offer. What the nodes hold of
        # their former ranks then tells which saves to recover.
        return own, (told, link.saves_of_node() if is_redundant and not told else ())

    (slab, offers), replies = gathered(taken)
    everyone = [told for told, _ in replies]
    reach("load.taken")
    newest = newest_saves(everyone, config.slots, [saves for _, saves in replies])
    lacking = lacking_ranks(everyone, newest)
    if is_redundant and newest and lacking:

        def recovered() -> tuple[_Taken, list[dict[str, Any]]]:
            if checkpointer.rank not in lacking:
                return _told((slab, offers))
            link.recover(newest)
            return _told(link.take_slab())

        (slab, offers), everyone = gathered(recovered)
    if slab is None:
        return []
    mine = {offer.save_id: offer for offer in offers}
    return [
        InMemory(slab, mine[theirs[0]["save_id"]], _committed(theirs), _lineage(theirs))
        for theirs in common_saves(everyone)
    ]


_Taken = tuple[Slab | None, tuple[Offer, ...]]


def _told(taken: _Taken) -> tuple[_Taken, list[dict[str, Any]]]:
    """Return this rank's slot offers, and the fields of them that are gathered from all ranks."""
    return taken, [
        {name: getattr(offer, name) for name in offer.__struct_fields__ if name != "digests"}
        for offer in taken[1]
    ]


def _lineage(offers: list[dict[str, Any]]) -> frozenset[str]:
    return frozenset[str]().union(*(offer["lineage"] for offer in offers))


def _committed(offers: list[dict[str, Any]]) -> int:
    """Return the newest iteration known to be committed, by the offers of one save of all ranks.

    The agent that had rank 0 knows, because it moved the tracker; rank 0 may be on another node
    now. If that agent is gone, the others know of the saves that their own slots hold; but not of
    those that came from other nodes.
    """
    own = [offer for offer in offers if not offer["recovered"]]
    durable = bool(own) and all(offer["durable"] for offer in own)
    known = max(offer["committed"] for offer in offers)
    return int(max(known, offers[0]["iteration"] if durable else -1))
