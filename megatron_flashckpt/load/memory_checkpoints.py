"""The checkpoints that all ranks hold in their slots, as their agents offer them."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.collectives import run_and_gather
from megatron_flashckpt.errors import AgentError, StorageError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.load.offers import common_saves, missing_ranks, newest_saves
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save.agent_link import NodeLink
from megatron_flashckpt.save.checkpointer import Checkpointer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint that every rank holds in a slot, with this rank's slab and slot offer."""

    slab: Slab
    offer: Offer
    committed: int
    """Newest committed iteration that agents know of; -1 if they know of none."""
    lineage: frozenset[str] = frozenset()
    """Ancestors of this save that agents know of; see `protocol.Offer`."""
    link: NodeLink | None = None
    """The owner of the slab, with the connection to the agent that offers it."""

    def is_pinned(self, end: int) -> bool:
        """Return whether all bytes of the slab below `end` are page-locked; may become true."""
        return self.link is not None and self.link.stager.is_pinned(end)

    def lend(self, rank: int) -> tuple[Slab, Offer] | None:
        """Return the slab and the offer of another rank of this node; None if it has neither."""
        try:
            return None if self.link is None else self.link.client().lend(rank, self.offer.save_id)
        except (AgentError, StorageError) as error:
            logger.warning("the slot of rank %d is received from that rank: %s", rank, error)
            return None


def held_in_memory(checkpointer: Checkpointer) -> list[MemoryCheckpoint]:
    """Return the checkpoints that *all* ranks hold, newest first. Collective.

    With `redundancy`, ranks of a lost node, and ranks that run on another node than before, first
    recover the copies that other nodes hold.
    """
    link, config = checkpointer.link, checkpointer.config
    is_redundant = config.redundancy != "none"
    if is_redundant:
        checkpointer.start_run()

    def slab_and_offers() -> tuple[
        _SlabAndOffers, tuple[list[dict[str, Any]], tuple[tuple[int, str], ...]]
    ]:
        own, fields = _with_gathered_fields(link.take_slab())
        # If all ranks run on other nodes than before, no rank has an offer. The saves that the
        # nodes hold for their former ranks then show which saves to recover.
        return own, (fields, link.saves_of_node() if is_redundant and not fields else ())

    (slab, offers), replies = run_and_gather(slab_and_offers)
    all_offers = [fields for fields, _ in replies]
    hit("load.taken")
    newest = newest_saves(all_offers, config.slots, [saves for _, saves in replies])
    recovering = missing_ranks(all_offers, newest)
    if is_redundant and newest and recovering:

        def recovered() -> tuple[_SlabAndOffers, list[dict[str, Any]]]:
            if checkpointer.rank not in recovering:
                return _with_gathered_fields((slab, offers))
            link.recover(newest)
            return _with_gathered_fields(link.take_slab())

        (slab, offers), all_offers = run_and_gather(recovered)
    if slab is None:
        return []
    own = {offer.save_id: offer for offer in offers}
    return [
        MemoryCheckpoint(
            *(slab, own[by_rank[0]["save_id"]], _committed(by_rank), _lineage(by_rank)),
            link,
        )
        for by_rank in common_saves(all_offers)
    ]


_SlabAndOffers = tuple[Slab | None, tuple[Offer, ...]]


def _with_gathered_fields(
    slab_and_offers: _SlabAndOffers,
) -> tuple[_SlabAndOffers, list[dict[str, Any]]]:
    """Return this rank's slot offers, and the fields of them that are gathered from all ranks."""
    return slab_and_offers, [
        {name: getattr(offer, name) for name in offer.__struct_fields__ if name != "digests"}
        for offer in slab_and_offers[1]
    ]


def _lineage(offers: list[dict[str, Any]]) -> frozenset[str]:
    return frozenset[str]().union(*(offer["lineage"] for offer in offers))


def _committed(offers: list[dict[str, Any]]) -> int:
    """Return the newest iteration known to be committed, from all ranks' offers of one save.

    The agent that had rank 0 moved the tracker and knows that iteration; rank 0 may now be on
    another node. If that agent is gone, the others know whether the saves in their own slots are
    durable, except for saves that they recovered from other nodes.
    """
    own = [offer for offer in offers if not offer["recovered"]]
    durable = bool(own) and all(offer["durable"] for offer in own)
    known = max(offer["committed"] for offer in offers)
    return int(max(known, offers[0]["iteration"] if durable else -1))
