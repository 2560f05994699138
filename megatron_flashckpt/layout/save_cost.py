"""What a save took, of one rank and of all. Plain numbers: they stand in records and manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

PlanOrigin = Literal["computed", "found", "kept"]
"""How a rank came by its plan: computed it, found another rank's, or kept that of its last save."""


class Plans(msgspec.Struct, frozen=True, kw_only=True):
    """The number of ranks that computed, found or kept the plan of a save."""

    computed: int
    found: int
    kept: int


class RankCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a save took on one rank."""

    started_at: float
    """When training called for it, in seconds since 1970."""
    blocked_s: float
    """Seconds that the training loop waited: in Megatron's `save_checkpoint_and_time`, which
    synchronizes the GPU and all ranks, or, where that was not replaced, in `save_checkpoint`."""
    staged_s: float
    """Until all was in host memory."""
    persisted_s: float | None = None
    """Until the shard was durable; None: it is not, yet."""
    plan: PlanOrigin | None = None
    """None: not recorded."""


class SaveCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a save took on the rank for which it took longest, phase by phase."""

    nbytes: int
    """Of all shards."""
    started_at: float
    """When rank 0 called for it, in seconds since 1970."""
    blocked_s: float
    staged_s: float
    persisted_s: float
    slowest: int
    """The rank whose shard was durable last."""
    durable_s: float
    """Until all of it was committed; never less than `persisted_s`."""
    plans: Plans | None = None
    """None: not recorded."""


def combine(costs: Mapping[int, RankCost], nbytes: int, committed_at: float) -> SaveCost | None:
    """Return the cost of a save from those of its ranks, as far as they are known.

    None if that of rank 0 is not: it did not live to say.

    Args:
        committed_at: by the clock of rank 0's node, in seconds since 1970.
    """
    first = costs.get(0)
    if first is None:
        return None
    slowest = max(costs, key=lambda rank: costs[rank].persisted_s or 0.0)
    persisted_s = costs[slowest].persisted_s or 0.0
    return SaveCost(
        nbytes=nbytes,
        started_at=first.started_at,
        blocked_s=max(cost.blocked_s for cost in costs.values()),
        staged_s=max(cost.staged_s for cost in costs.values()),
        persisted_s=persisted_s,
        slowest=slowest,
        # Ranks do not call at the same moment, and nodes' clocks differ, but no save is committed
        # before its last shard is durable.
        durable_s=max(persisted_s, committed_at - first.started_at),
        plans=_plans([cost.plan for cost in costs.values()]),
    )


def _plans(origins: Sequence[PlanOrigin | None]) -> Plans | None:
    if not any(origins):
        return None
    return Plans(
        computed=origins.count("computed"), found=origins.count("found"), kept=origins.count("kept")
    )
