"""The checkpoints that ranks hold in their slots, as their agents offer them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.collectives import run_and_gather
from megatron_flashckpt.errors import UNDECODABLE, AgentError, CorruptCheckpointError, StorageError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format.run_object import Ancestors
from megatron_flashckpt.load.offers import HeldSave, held_saves, missing_ranks, newest_saves
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.node_link import NodeLink

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint that its ranks hold in slots, with this rank's slab and slot offer."""

    slab: Slab | None
    """None on a rank that the saving job did not have; then `offer` is that of rank 0."""
    offer: Offer
    ancestors: Ancestors = ()
    """Those of the run that made the save. Equal on all ranks."""
    link: NodeLink | None = None
    """The owner of the slab, with the connection to the agent that offers it."""

    @property
    def save(self) -> Save:
        return Save(self.offer.iteration, self.offer.save_id)

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

    @property
    def ancestors(self) -> dict[Save, Ancestors]:
        """The saves that can be loaded, with the ancestors of their runs."""
        return {held.save: held.ancestors for held in self.checkpoints}


def held_in_memory(checkpointer: Checkpointer) -> HeldInMemory:
    """Return the saves that ranks hold. Collective.

    Ranks whose memory is lost, and ranks that run on another node than before, first recover
    copies: from their node's disk with `local_tier`, from other nodes with `redundancy`.
    """
    link, config = checkpointer.link, checkpointer.config
    is_redundant = config.redundancy != "none"
    has_copies = is_redundant or config.local_tier.directory is not None
    if is_redundant:
        checkpointer.start_run()

    def slab_and_offers() -> tuple[
        _SlabAndOffers, tuple[list[dict[str, Any]], tuple[tuple[int, str], ...]]
    ]:
        own, fields = _with_gathered_fields(link.take_slab(), checkpointer.rank)
        # If all ranks run on other nodes than before, no rank has an offer. The saves that the
        # nodes hold for their former ranks then show which saves to recover.
        return own, (fields, link.client().saves_of_node() if has_copies and not fields else ())

    (slab, offers), replies = run_and_gather(slab_and_offers)
    all_offers = [fields for fields, _ in replies]
    hit("load.taken")
    newest = newest_saves(all_offers, config.slots, [saves for _, saves in replies])
    recovering = missing_ranks(all_offers, newest)
    if has_copies and newest and recovering:

        def recovered() -> tuple[_SlabAndOffers, list[dict[str, Any]]]:
            if checkpointer.rank not in recovering:
                return _with_gathered_fields((slab, offers), checkpointer.rank)
            link.recover(newest)
            return _with_gathered_fields(link.take_slab(), checkpointer.rank)

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
    described = ("world_size", "ancestors")
    first = {name: value for name, value in offers[0].items() if name not in described}
    return MemoryCheckpoint(
        slab if own is not None else None,
        own or Offer(**first, digests=None),
        # All owners hold the save, so rank 0 does.
        save.by_rank[0].get("ancestors", ()),
        link,
    )


_SlabAndOffers = tuple[Slab | None, tuple[Offer, ...]]


def _with_gathered_fields(
    slab_and_offers: _SlabAndOffers, rank: int
) -> tuple[_SlabAndOffers, list[dict[str, Any]]]:
    """Return this rank's slot offers, and the fields of them that are gathered from all ranks."""
    slab, offers = slab_and_offers
    return slab_and_offers, [
        {
            **{name: getattr(offer, name) for name in offer.__struct_fields__ if name != "digests"},
            **({"world_size": None} if slab is None else _described(slab, offer, rank)),
        }
        for offer in offers
    ]


class _SavedBy(msgspec.Struct):
    """The part of a slot's description that a choice needs; the rest is not decoded."""

    world_size: int
    ancestors: Ancestors = ()


_SAVED_BY = msgspec.msgpack.Decoder(_SavedBy)


def _described(slab: Slab, offer: Offer, rank: int) -> dict[str, Any]:
    """Return what a slot's description tells of its save; nothing if it is damaged.

    Rank 0 alone tells the ancestors, which may be a thousand and are equal on all ranks.
    """
    try:
        saved_by = _SAVED_BY.decode(slab.slots[offer.slot].encoded_meta())
    except (CorruptCheckpointError, *UNDECODABLE):
        return {"world_size": None}
    of_rank_0 = {"ancestors": saved_by.ancestors} if rank == 0 else {}
    return {"world_size": saved_by.world_size, **of_rank_0}
