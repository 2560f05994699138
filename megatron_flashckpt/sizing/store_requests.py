"""Requests of saves to an object store, and their price.

The numbers per save are those of a job on one node, which `tests/agent/test_object_store.py` counts
at a server; loads, starts and retries are left out. Deletions are free in S3.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from megatron_flashckpt.sizing.cluster_model import DAY_S, GB, Plan

#: Seconds between two signs of life, each of which is one write and two reads.
_ALIVE_S = 2.0


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Prices in US dollars. The defaults are list prices of S3 Standard in us-east-1."""

    usd_per_1000_writes: Annotated[
        float, msgspec.Meta(description="price of 1,000 puts, posts and lists, US dollars")
    ] = 0.005
    usd_per_1000_reads: Annotated[
        float, msgspec.Meta(description="price of 1,000 gets and heads, US dollars")
    ] = 0.0004
    usd_per_gb_month: Annotated[
        float, msgspec.Meta(description="price of 1 GB (1e9 bytes) for a month, US dollars")
    ] = 0.023


class Requests(msgspec.Struct, frozen=True):
    """Requests by what they cost; a list costs as much as a put."""

    writes: float
    reads: float

    def usd(self, prices: Prices) -> float:
        cost = self.writes * prices.usd_per_1000_writes + self.reads * prices.usd_per_1000_reads
        return cost / 1000


class StoreUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of an object store by the saves of a job at the best interval."""

    per_save: Requests
    per_save_and_node: Requests
    per_day: Requests
    """With those of the run's sign of life, and of every node's looks for requests to save."""
    nbytes_per_day: float
    usd_per_day: float
    """Price of the requests."""
    usd_per_checkpoint_month: float
    """Price of keeping one checkpoint for a month."""


def of_a_save(
    *, ranks: int, nodes: int, parts: int, waiting_s: float, longest_pause_s: float
) -> Requests:
    """Return the requests of one save.

    Args:
        parts: of the upload of one rank.
        waiting_s: time for which a node asks whether the save has ended. The longest that it can
            be counts, so the result is an upper bound.
        longest_pause_s: pause between two such questions, in a job of this many nodes.
    """
    asked = waiting_s / longest_pause_s
    return Requests(
        # An upload begins and ends with a request of its own. A node creates one record; the
        # committing node puts five names and lists seven times.
        writes=ranks * (parts + 2) + nodes + 12,
        # Each rank's agent looks for its shard first. The committing node looks at each shard and
        # reads each record; all nodes ask for the end four times at least, and read it.
        reads=2 * ranks + nodes * (9 + asked) + 4,
    )


def store_use(plan: Plan, per_save: Requests, prices: Prices, looks_every_s: float) -> StoreUse:
    """Return what the saves of `plan` ask of an object store.

    Args:
        looks_every_s: pause between two looks of a node for a request of `flashckpt save-now`,
            each of which is a list.
    """
    saves, signs = DAY_S / plan.ours.interval_s, DAY_S / _ALIVE_S
    looks = plan.nodes * DAY_S / looks_every_s
    writes = saves * per_save.writes + signs + looks
    per_day = Requests(writes, saves * per_save.reads + 2 * signs)
    return StoreUse(
        per_save=per_save,
        per_save_and_node=Requests(per_save.writes / plan.nodes, per_save.reads / plan.nodes),
        per_day=per_day,
        nbytes_per_day=plan.ours.nbytes_per_day,
        usd_per_day=per_day.usd(prices),
        usd_per_checkpoint_month=plan.sizes.total_nbytes / GB * prices.usd_per_gb_month,
    )
