"""Memory of ranks that a new run, smaller or reshuffled, does not have on this node.

The slots of such a rank are kept until the new run has loaded, because other nodes may recover
them. After that, staged slots are still written to storage and committed; then the memory is freed.
"""

from __future__ import annotations

import functools
import logging
import time

from megatron_flashckpt.agent.committer import Committer
from megatron_flashckpt.agent.freeing import in_background
from megatron_flashckpt.agent.node import Node
from megatron_flashckpt.agent.rank_slots import RankSlots
from megatron_flashckpt.agent.run_messages import BeginRun, HeldSlab, describe_slabs
from megatron_flashckpt.memory.slab import Slab

logger = logging.getLogger(__name__)


class DepartedRanks:
    """Frees the slabs of ranks that the run does not have on this node."""

    def __init__(self, node: Node, committer: Committer) -> None:
        self._node = node
        self._committer = committer
        self._run_id = ""
        self._ranks: set[int] = set()
        #: Ranks that have sent `BeginRun`. The run has started when all of its ranks have.
        self._loaded: set[int] = set()
        #: Threads that are unmapping slabs.
        self._closing = 0

    def begin_run(self, number: int, request: BeginRun) -> None:
        """Record that a rank has loaded and belongs to a run. The caller holds the lock."""
        if request.run_id != self._run_id:
            self._run_id, self._ranks, self._loaded = request.run_id, set(), set()
        # Containers that share an agent each report only their own ranks.
        self._ranks.update(request.ranks)
        self._loaded.add(number)
        self._release()

    def release(self) -> None:
        """Free slabs that are no longer needed. Called often."""
        with self._node.changed:
            self._release()

    def held(self, wait_s: float) -> tuple[HeldSlab, ...]:
        """Wait up to `wait_s` until departed ranks' slabs are freed; return all slabs held.

        The caller holds the node's lock.
        """
        deadline = time.monotonic() + wait_s
        while self._is_releasing():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._node.changed.wait(left_s):
                break
        return tuple(
            self._described(number, slots)
            for number, rank in sorted(self._node.ranks.items())
            for slots in rank.all_slots
        )

    def _departed(self) -> list[int]:
        """Return the ranks that the run on this node does not have, once it has started."""
        if not self._ranks or not self._loaded >= self._ranks:
            return []
        return [
            number
            for number, rank in self._node.ranks.items()
            if number not in self._ranks and rank.connection is None
        ]

    def _is_releasing(self) -> bool:
        """Free what can be freed; return whether slabs of departed ranks remain."""
        self._release()
        return self._closing > 0 or bool(self._departed())

    def _release(self) -> None:
        freed: list[Slab] = []
        described: list[HeldSlab] = []
        for number in self._departed():
            rank = self._node.ranks[number]
            if rank.retired or self._is_in_use(number, rank.slots):
                continue
            if rank.slots is not None:
                freed.append(rank.slots.slab)
                described.append(self._described(number, rank.slots))
            del self._node.ranks[number]
        if self._node.ranks:
            # The first rank is part of the names of this node's trace files; a departed rank may
            # run on another node now.
            self._node.traces.first_rank = min(self._node.ranks)
        if freed:
            logger.info(
                "freed the host memory of ranks that the run on this node does not have: %s",
                describe_slabs(described),
            )
            self._closing += 1
            in_background(functools.partial(self._close, freed))

    def _is_in_use(self, number: int, slots: RankSlots | None) -> bool:
        """Return whether slots are being written, or their rank has a save without a result."""
        return (slots is not None and slots.is_persisting) or any(
            number in save.metas for save in self._committer.pending.values()
        )

    def _close(self, slabs: list[Slab]) -> None:
        try:
            for slab in slabs:
                slab.close()
        finally:
            with self._node.changed:
                self._closing -= 1
                self._node.changed.notify_all()

    def _described(self, number: int, slots: RankSlots) -> HeldSlab:
        offers = slots.offers()
        newest = offers[0] if offers else None
        is_departed = bool(self._ranks) and number not in self._ranks
        return HeldSlab(
            number,
            slots.slab.geometry.nbytes,
            -1 if newest is None else newest.iteration,
            newest is not None and newest.durable,
            is_departed,
            self._is_in_use(number, slots),
        )
