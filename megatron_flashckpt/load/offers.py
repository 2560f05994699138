"""Selection of saves from the slot offers of all ranks, which are dictionaries in rank order.

A save belongs to the ranks of the job that saved it: field `world_size` of an offer. A job with
more ranks can load the save, although its new ranks hold no part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class HeldSave:
    """A save that at least one rank holds in a slot. Equal on all ranks."""

    iteration: int
    save_id: str
    world_size: int
    """Number of ranks that saved it."""
    by_rank: dict[int, dict[str, Any]]
    """The offers of this save."""
    missing: tuple[int, ...]
    """Ranks of this job that saved a part and do not hold it."""


def newest_saves(
    all_offers: list[list[dict[str, Any]]],
    count: int,
    node_saves: Iterable[Iterable[tuple[int, str]]] = (),
) -> tuple[str, ...]:
    """Return the newest `count` saves that any rank holds; all ranks may have held these.

    If no rank holds a save, return the newest saves of all nodes: the ranks may have changed nodes.

    Args:
        node_saves: iteration and id of the saves in the slots of each node, of any rank.
    """
    held = {(offer["iteration"], offer["save_id"]) for offers in all_offers for offer in offers}
    held = held or {save for saves in node_saves for save in saves}
    return tuple(save_id for _, save_id in sorted(held, reverse=True)[:count])


def missing_ranks(all_offers: list[list[dict[str, Any]]], newest: tuple[str, ...]) -> list[int]:
    """Return the ranks that hold none of the newest saves, which are those of a lost node.

    Ranks that the saving job did not have are left out.
    """
    saves = [save for save in held_saves(all_offers) if save.save_id in newest]
    owners = max((save.world_size for save in saves), default=len(all_offers))
    holders = {rank for save in saves for rank in save.by_rank}
    return [rank for rank in range(min(owners, len(all_offers))) if rank not in holders]


def held_saves(all_offers: list[list[dict[str, Any]]]) -> list[HeldSave]:
    """Return every save that any rank holds, the newest first."""
    by_save: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
    for rank, offers in enumerate(all_offers):
        for offer in offers:
            by_save.setdefault((offer["iteration"], offer["save_id"]), {})[rank] = offer
    # Order by iteration, then by save id, so that the order is equal on all ranks.
    return [
        _held_save(*save, by_rank, len(all_offers))
        for save, by_rank in sorted(by_save.items(), reverse=True)
    ]


def _held_save(
    iteration: int, save_id: str, by_rank: dict[int, dict[str, Any]], ranks: int
) -> HeldSave:
    # A description that cannot be read names no size; the load of that slot reports the damage.
    world_size = max(offer.get("world_size") or 0 for offer in by_rank.values()) or ranks
    owners = range(min(world_size, ranks))
    missing = tuple(rank for rank in owners if rank not in by_rank)
    return HeldSave(iteration, save_id, world_size, by_rank, missing)
