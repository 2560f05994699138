"""The checkpoints that ranks hold in their slots, as their agents offer them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.collectives import run_and_gather
from megatron_flashckpt.errors import UNDECODABLE, AgentError, CorruptCheckpointError, StorageError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.load.offers import HeldSave, held_saves, missing_ranks, newest_saves
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save.agent_link import NodeLink
from megatron_flashckpt.save.checkpointer import Checkpointer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint that its ranks hold in slots, with this rank's slab and slot offer."""

    slab: Slab | None
    """None on a rank that the saving job did not have; then `offer` is that of rank 0."""
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


class HeldInMemory(NamedTuple):
    """The saves in the slots of all ranks, newest first. Equal on all ranks, except for slabs."""

    checkpoints: Sequence[MemoryCheckpoint] = ()
    """The saves that can be loaded: each rank that saved a part holds that part."""
    incomplete: tuple[HeldSave, ...] = ()
    """The other saves."""


def held_in_memory(checkpointer: Checkpointer) -> HeldInMemory:
    """Return the saves that ranks hold. Collective.

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
    own = {offer.save_id: offer for offer in offers}
    saves = held_saves(all_offers)
    return HeldInMemory(
        [
            _checkpoint(save, slab, own.get(save.save_id), link)
            for save in saves
            if not save.missing
        ],
        tuple(save for save in saves if save.missing),
    )


def _checkpoint(
    save: HeldSave, slab: Slab | None, own: Offer | None, link: NodeLink
) -> MemoryCheckpoint:
    offers = [offer for _, offer in sorted(save.by_rank.items())]
    first = {name: value for name, value in offers[0].items() if name != "world_size"}
    return MemoryCheckpoint(
        slab if own is not None else None,
        own or Offer(**first, digests=None),
        _committed(offers),
        _lineage(offers),
        link,
    )


_SlabAndOffers = tuple[Slab | None, tuple[Offer, ...]]


def _with_gathered_fields(
    slab_and_offers: _SlabAndOffers,
) -> tuple[_SlabAndOffers, list[dict[str, Any]]]:
    """Return this rank's slot offers, and the fields of them that are gathered from all ranks."""
    slab, offers = slab_and_offers
    return slab_and_offers, [
        {
            **{name: getattr(offer, name) for name in offer.__struct_fields__ if name != "digests"},
            "world_size": None if slab is None else _world_size(slab, offer),
        }
        for offer in offers
    ]


class _SavedBy(msgspec.Struct):
    """The part of a slot's description that tells its number of ranks; the rest is not decoded."""

    world_size: int


_SAVED_BY = msgspec.msgpack.Decoder(_SavedBy)


def _world_size(slab: Slab, offer: Offer) -> int | None:
    """Return the number of ranks that saved a slot; None if its description is damaged."""
    try:
        return _SAVED_BY.decode(slab.slots[offer.slot].encoded_meta()).world_size
    except (CorruptCheckpointError, *UNDECODABLE):
        return None


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
