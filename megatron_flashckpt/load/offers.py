"""Selection of saves from the slot offers of all ranks, which are dictionaries in rank order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


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
    """Return the ranks that hold none of the newest saves, which are those of a lost node."""
    return [
        rank
        for rank, offers in enumerate(all_offers)
        if not any(offer["save_id"] in newest for offer in offers)
    ]


def common_saves(all_offers: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return the offers of each save that all ranks hold, in rank order; the newest save first."""
    by_rank = [{offer["save_id"]: offer for offer in offers} for offers in all_offers]
    common = set(by_rank[0]).intersection(*by_rank[1:])
    # Order by iteration, then by save id, so that the order is equal on all ranks.
    order = sorted(common, key=lambda save_id: (by_rank[0][save_id]["iteration"], save_id))
    return [[offers[save_id] for offers in by_rank] for save_id in reversed(order)]
