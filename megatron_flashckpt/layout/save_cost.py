"""Timings of a save, per rank and combined; commit records and manifests store these structs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

PlanOrigin = Literal["computed", "found", "kept"]
"""Origin of a rank's plan: computed, found at the agent, or kept from the rank's last save."""


class Plans(msgspec.Struct, frozen=True, kw_only=True):
    """The number of ranks that computed, found or kept the plan of a save."""

    computed: int
    found: int
    kept: int


class RankCost(msgspec.Struct, frozen=True, kw_only=True):
    """Timings of a save on one rank, in seconds after `started_at`."""

    started_at: float
    """Time of the call of `save_checkpoint`, in seconds since 1970."""
    blocked_s: float
    """Seconds that the training loop waited in Megatron's `save_checkpoint_and_time`, which
    synchronizes the GPU and all ranks; or in `save_checkpoint`, if the former was not replaced."""
    staged_s: float
    """Seconds until host memory held all tensors."""
    persisted_s: float | None = None
    """Seconds until the shard was durable; None before that."""
    plan: PlanOrigin | None = None
    """None if not recorded."""


class SaveCost(msgspec.Struct, frozen=True, kw_only=True):
    """Timings of a save over all ranks: each phase's longest, in seconds after `started_at`."""

    nbytes: int
    """Total size of all shards."""
    started_at: float
    """Time of rank 0's call of `save_checkpoint`, in seconds since 1970."""
    blocked_s: float
    staged_s: float
    persisted_s: float
    slowest: int
    """The rank whose shard became durable last."""
    durable_s: float
    """Seconds until the checkpoint was committed; at least `persisted_s`."""
    plans: Plans | None = None
    """None if not recorded."""


def combine(costs: Mapping[int, RankCost], nbytes: int, committed_at: float) -> SaveCost | None:
    """Return the timings of a save from the known timings of its ranks.

    Returns None if rank 0 reported no timings because it died.

    Args:
        nbytes: total size of all shards.
        committed_at: time of the commit by the clock of rank 0's node, in seconds since 1970.
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
        # Ranks start at different moments and node clocks differ, but a commit always follows
        # the last durable shard.
        durable_s=max(persisted_s, committed_at - first.started_at),
        plans=_plans([cost.plan for cost in costs.values()]),
    )


def _plans(origins: Sequence[PlanOrigin | None]) -> Plans | None:
    if not any(origins):
        return None
    return Plans(
        computed=origins.count("computed"), found=origins.count("found"), kept=origins.count("kept")
    )
