"""Fills the slots of ranks whose memory is gone, from copies on local disks and other nodes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Collection

from megatron_flashckpt.agent import slot_bytes
from megatron_flashckpt.agent.freeing import free
from megatron_flashckpt.agent.node import Node
from megatron_flashckpt.agent.protocol import Recover
from megatron_flashckpt.agent.rank_slots import RankSlots
from megatron_flashckpt.agent.slot_bytes import Copy
from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotState

logger = logging.getLogger(__name__)

#: Ranks of a node that are recovered at the same time.
_AT_ONCE = 8


class Recoveries:
    """Recoveries of this node's ranks. A trainer asks for one until that has ended."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "recover")
        self._running: dict[int, concurrent.futures.Future[bool]] = {}
        #: Ranks whose recovery their present trainer has not requested.
        self._unrequested: set[int] = set()

    def recover(self, rank: int, request: Recover) -> bool:
        """Return whether the recovery of a rank has ended; the first call starts it.

        The rank's slots show the result.
        """
        with self._lock:
            future = self._running.get(rank)
            if future is None or (rank in self._unrequested and future.done()):
                future = self._pool.submit(self._recover, rank, request)
                self._running[rank] = future
            self._unrequested.discard(rank)
        done, _ = concurrent.futures.wait([future], request.wait_s)
        if done:
            with self._lock:
                if self._running.get(rank) is future:
                    del self._running[rank]
        return bool(done) and future.result()

    def begin_trainer(self, rank: int) -> None:
        """Note that the trainer which requested a recovery of the rank has a successor.

        A running recovery continues, but its slots count only if the successor requests one, too:
        the successor may have slots of its own by then.
        """
        with self._lock:
            if rank in self._running:
                self._unrequested.add(rank)

    def close(self) -> None:
        """Begin no more recoveries."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _recover(self, rank: int, request: Recover) -> bool:
        """Recover a rank; return False if no trainer waited for the slots, which are freed."""
        try:
            copies = self._copies(rank)
            wanted = {save_id: copies[save_id] for save_id in request.saves if save_id in copies}
            if not wanted:
                logger.warning("rank %d: no node has any of its requested checkpoints", rank)
                return True
            slots = filled(rank, wanted.values(), huge_pages=request.huge_pages)
            if slots is not None:
                with self._node.changed:
                    if rank in self._unrequested:
                        free(slots.slab)
                        return False
                    self._node.replace_slots(self._node.ranks[rank], slots)
                hit("recover.installed")
        except Exception:  # the trainer waits for the end, and then loads what there is
            logger.exception("rank %d: nothing was recovered", rank)
        return True

    def _copies(self, rank: int) -> dict[str, Copy]:
        """Return the copies of a rank's checkpoints, by save: local ones before those of others.

        A slot of another node comes first, because that node's agent writes it to storage. Another
        copy replaces a local one that proves damaged. May take long.
        """
        peers = self._node.peers
        others = {} if peers is None else peers.find(rank)
        in_slots = {save_id: copy for save_id, copy in others.items() if copy.is_in_slot}
        local = {
            save_id: dataclasses.replace(copy, otherwise=others.get(save_id))
            for save_id, copy in self._node.local_copies.of_rank(rank).items()
        }
        return {**others, **local, **in_slots}


def filled(rank: int, copies: Collection[Copy], *, huge_pages: bool) -> RankSlots | None:
    """Return slots with the newest of these checkpoints, verified; None if no copy is whole.

    An incomplete or damaged copy is left out and logged.
    """
    chosen = sorted(copies, key=lambda copy: -copy.descriptor.iteration)
    # All slabs of a rank have one geometry, unless the checkpoint grew; then the newest save
    # decides.
    geometry = chosen[0].descriptor.geometry
    chosen = [copy for copy in chosen if copy.descriptor.geometry == geometry][: geometry.slots]
    sizes = (geometry.slots, geometry.meta_capacity, geometry.data_capacity)
    slab = Slab.create(*sizes, str(rank), huge_pages=huge_pages)
    complete: dict[int, Copy] = {}
    for index, first in enumerate(reversed(chosen)):
        copy = _filled_from(rank, slab, index, first)
        if copy is None:
            continue
        descriptor, slot = copy.descriptor, slab.slots[index]
        hit("recover.filled")
        # The bytes are verified; from here on, the slot's own digest covers the description.
        slot.set_meta(slot_bytes.description(slab, index, descriptor))
        slot.set_header(
            SlotHeader(
                SlotState.KEPT if descriptor.memory_only else SlotState.STAGED,
                descriptor.iteration,
                descriptor.save_id,
                descriptor.meta_nbytes,
                descriptor.data_nbytes,
            )
        )
        complete[index] = copy
    if not complete:
        slab.close()
        return None
    slots = RankSlots(slab)
    for index, copy in complete.items():
        slots.infos[index].digests = copy.descriptor.digests
        slots.infos[index].recovered = True
        slots.infos[index].elsewhere = copy.is_in_slot
    return slots


def _filled_from(rank: int, slab: Slab, index: int, first: Copy) -> Copy | None:
    """Fill a slot from a copy or the one instead of it; return the whole one, None if none is."""
    copy: Copy | None = first
    while copy is not None:
        subject = (rank, copy.descriptor.iteration, copy.place)
        try:
            damage: str | None = "it has other sizes"
            if copy.descriptor.geometry == slab.geometry:
                copy.fill(slab, index)
                damage = slot_bytes.damage(slab, index, copy.descriptor)
        except (FlashCkptError, OSError) as error:
            damage = str(error)
        if damage is None:
            logger.info("rank %d: recovered iteration %d from %s", *subject)
            return copy
        logger.error("rank %d: iteration %d not recovered from %s: %s", *subject, damage)
        copy = copy.otherwise
    return None
