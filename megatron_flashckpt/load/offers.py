"""What all ranks hold, by what each of them is offered: rank by rank, offers as dictionaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def newest_saves(
    everyone: list[list[dict[str, Any]]],
    count: int,
    of_nodes: Iterable[Iterable[tuple[int, str]]] = (),
) -> tuple[str, ...]:
    """Return the newest saves that any rank holds: what all of them may have had in their slots.

    If no rank holds a save, return the newest saves of all nodes: the ranks may have changed nodes.

    Args:
        of_nodes: iteration and id of the saves that are in slots of each node, of whatever rank.
    """
    seen = {(offer["iteration"], offer["save_id"]) for theirs in everyone for offer in theirs}
    seen = seen or {save for saves in of_nodes for save in saves}
    return tuple(save_id for _, save_id in sorted(seen, reverse=True)[:count])


def lacking_ranks(everyone: list[list[dict[str, Any]]], newest: tuple[str, ...]) -> list[int]:
    """Return the ranks that hold none of the newest saves: those of a node that was lost."""
    return [
        rank
        for rank, offered in enumerate(everyone)
        if not any(offer["save_id"] in newest for offer in offered)
    ]


def common_saves(everyone: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return the offers, rank by rank, of each save that all ranks hold; the newest first."""
    held = [{offer["save_id"]: offer for offer in offered} for offered in everyone]
    common = set(held[0]).intersection(*held[1:])
    # Newest iteration; among saves of the same iteration the id decides, alike on all ranks.
    order = sorted(common, key=lambda save_id: (held[0][save_id]["iteration"], save_id))
    return [[theirs[save_id] for theirs in held] for save_id in reversed(order)]
