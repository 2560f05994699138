"""Memory of ranks that a new run, which is smaller or was reshuffled, does not have on this node.

The slots of such a rank are wanted until the new run has loaded: other nodes may recover them. Then
what is staged in them is still written to storage and committed; after that the memory is freed.
"""

from __future__ import annotations

import logging
import threading
import time

from megatron_flashckpt.agent.commit_thread import Committer
from megatron_flashckpt.agent.run_messages import BeginRun, HeldSlab
from megatron_flashckpt.agent.slot_table import RankSlots
from megatron_flashckpt.agent.state import Node, Trainer
from megatron_flashckpt.memory.host_memory import shown
from megatron_flashckpt.memory.slab import Slab

logger = logging.getLogger(__name__)


class Departed:
    """Frees the slabs of ranks that are not of the run on this node."""

    def __init__(self, node: Node, committer: Committer) -> None:
        self._node = node
        self._committer = committer
        self._run_id = ""
        self._ranks: set[int] = set()
        #: Ranks of the run that have said so. The run has started when all of them have.
        self._here: set[int] = set()
        #: Slabs that are being unmapped.
        self._closing = 0

    def begin_run(self, number: int, request: BeginRun) -> None:
        """Note that a rank has loaded and belongs to a run. The caller holds the node's lock."""
        if request.run_id != self._run_id:
            self._run_id, self._ranks, self._here = request.run_id, set(), set()
        # Containers of one machine that share an agent know of their own ranks only.
        self._ranks.update(request.ranks)
        self._here.add(number)
        self._release()

    def release(self) -> None:
        """Free what is not needed any more. Called often."""
        with self._node.changed:
            self._release()

    def held(self, wait_s: float) -> tuple[HeldSlab, ...]:
        """Return the slabs of all ranks; wait until those of departed ranks are freed.

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
            for slots in (rank.slots, *rank.retired)
            if slots is not None
        )

    def _departed(self) -> list[int]:
        """Return the ranks that the run on this node does not have, once it has started."""
        if not self._ranks or not self._here >= self._ranks:
            return []
        return [
            number
            for number, rank in self._node.ranks.items()
            if number not in self._ranks and rank.connection is None
        ]

    def _is_releasing(self) -> bool:
        self._release()
        return self._closing > 0 or bool(self._departed())

    def _release(self) -> None:
        freed: list[Slab] = []
        lines = []
        for number in self._departed():
            rank = self._node.ranks[number]
            if self._is_needed(number, rank):
                continue
            if rank.slots is not None:
                freed.append(rank.slots.slab)
                lines.append(_farewell(number, rank.slots))
            del self._node.ranks[number]
        if self._node.ranks:
            # It names the files of this node's traces; a departed rank may be on another node now.
            self._node.traces.first_rank = min(self._node.ranks)
        if freed:
            logger.info(
                "freed %s of host memory of ranks that are not of the run on this node: %s",
                shown(sum(slab.geometry.nbytes for slab in freed)),
                ", ".join(lines),
            )
            self._closing += 1
            threading.Thread(target=self._close, args=(freed,), daemon=True).start()

    def _is_needed(self, number: int, rank: Trainer) -> bool:
        """Return whether a slab of the rank is still read, or holds a save without an outcome."""
        slots = [*rank.retired, *([] if rank.slots is None else [rank.slots])]
        return (
            bool(rank.retired)
            or any(each.busy for each in slots)
            or any(number in save.metas for save in self._committer.pending.values())
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
            slots.busy or any(number in save.metas for save in self._committer.pending.values()),
        )


def _farewell(number: int, slots: RankSlots) -> str:
    """Return what is said of a rank whose memory is freed."""
    offers = slots.offers()
    if not offers:
        return f"rank {number} (empty)"
    stored = "in storage" if offers[0].durable else "in memory only: the run does not continue it"
    return f"rank {number} (iteration {offers[0].iteration}, {stored})"
