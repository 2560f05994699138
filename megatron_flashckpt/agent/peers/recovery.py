"""Rebuilds a rank's checkpoints from the memory of other nodes.

Recovery goes by ranks, not by nodes: after a node was replaced, the launcher may assign a rank to
another node. So every agent reports its slots, copies and parity of a rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from megatron_flashckpt.agent.peers import messages as m
from megatron_flashckpt.agent.peers import slot_bytes
from megatron_flashckpt.agent.peers.holdings import combine
from megatron_flashckpt.agent.peers.messages import SlotDescriptor
from megatron_flashckpt.agent.peers.transport import PeerError
from megatron_flashckpt.agent.rank_slots import RankSlots
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotState

logger = logging.getLogger(__name__)

#: Sends requests to one node, a few ahead; yields the replies in order.
Pipeline = Callable[[Iterable[m.Request]], Iterator[tuple[m.Reply, bytes | memoryview]]]
#: Opens a pipeline to a node for the duration of the context.
Ask = Callable[[int], contextlib.AbstractContextManager[Pipeline]]


@dataclasses.dataclass(frozen=True)
class _Read:
    """A byte range that one node has."""

    node: int
    nbytes: int
    request: Callable[[int, int], m.Request]
    """Returns the request for a start and a size, counted from the start of the range."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A range of a checkpoint: the exclusive or of its reads."""

    start: int
    end: int
    reads: tuple[_Read, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Reads from which one checkpoint of a rank is rebuilt."""

    descriptor: SlotDescriptor
    pieces: tuple[_Piece, ...]
    is_in_slot: bool = False
    """True if an agent that is alive has the checkpoint in a slot, where the rank staged it."""

    @property
    def nodes(self) -> list[int]:
        """Nodes that the plan reads from."""
        return sorted({read.node for piece in self.pieces for read in piece.reads})


def plans(rank: int, replies: Mapping[int, m.Found]) -> dict[str, Plan]:
    """Return by save the plans to rebuild checkpoints of `rank`, given the replies per node."""
    slots = {slot: node for node, reply in replies.items() for slot in reply.slots}
    by_save: dict[str, Plan] = {}
    held: dict[str, list[tuple[int, m.Held]]] = {}
    for node, reply in sorted(replies.items()):
        for descriptor in reply.labels:
            read = _of_slot(node, rank, descriptor.save_id, 0, descriptor.nbytes)
            by_save[descriptor.save_id] = Plan(
                descriptor, (_Piece(0, descriptor.nbytes, (read,)),), True
            )
        for combined in reply.held:
            held.setdefault(combined.label.save_id, []).append((node, combined))
    for save_id, parts in held.items():
        plan = _combined(parts, slots)
        if plan is not None:
            by_save.setdefault(save_id, plan)
    return by_save


def _combined(parts: list[tuple[int, m.Held]], slots: Mapping[tuple[int, str], int]) -> Plan | None:
    """Return the plan that reads each part from its holder; None if a part is missing."""
    descriptor = parts[0][1].label
    pieces = {}
    for node, held in parts:
        start, end = held.part.bounds(descriptor.nbytes)
        reads = [_of_holder(node, held.part.parity_group, descriptor.save_id, end - start)]
        for other, low, high in held.others:
            if (other, descriptor.save_id) not in slots:
                break
            owner = slots[other, descriptor.save_id]
            reads.append(_of_slot(owner, other, descriptor.save_id, low, high))
        else:
            pieces[held.part.index] = _Piece(start, end, tuple(reads))
    if len(pieces) < parts[0][1].part.count:
        return None
    return Plan(descriptor, tuple(pieces.values()))


def _of_slot(node: int, rank: int, save_id: str, low: int, high: int) -> _Read:
    return _Read(node, high - low, lambda at, size: m.ReadSlot(rank, save_id, low + at, size))


def _of_holder(node: int, group: tuple[int, ...], save_id: str, nbytes: int) -> _Read:
    return _Read(node, nbytes, lambda at, size: m.ReadHeld(group, save_id, at, size))


def recover(
    rank: int, wanted: Collection[str], made: Mapping[str, Plan], ask: Ask, *, huge_pages: bool
) -> RankSlots | None:
    """Return slots with the newest of the wanted checkpoints, verified; None if there is none.

    An incomplete or damaged checkpoint is left out and logged.
    """
    chosen = sorted(
        (plan for save_id, plan in made.items() if save_id in wanted),
        key=lambda plan: -plan.descriptor.iteration,
    )
    if not chosen:
        return None
    # All slabs of a rank have one geometry, unless the checkpoint grew; then the newest save
    # decides.
    geometry = chosen[0].descriptor.geometry
    chosen = [plan for plan in chosen if plan.descriptor.geometry == geometry][: geometry.slots]
    sizes = (geometry.slots, geometry.meta_capacity, geometry.data_capacity)
    slab = Slab.create(*sizes, str(rank), huge_pages=huge_pages)
    complete: dict[int, Plan] = {}
    for index, plan in enumerate(reversed(chosen)):
        subject = (rank, plan.descriptor.iteration, ", ".join(map(str, plan.nodes)))
        try:
            for piece in plan.pieces:
                _fill(slab, index, plan.descriptor, piece, ask)
            damage = slot_bytes.damage(slab, index, plan.descriptor)
        except PeerError as error:
            damage = str(error)
        if damage is not None:
            logger.error("rank %d: iteration %d not recovered from nodes %s: %s", *subject, damage)
            continue
        logger.info("rank %d: recovered iteration %d from nodes %s", *subject)
        descriptor, slot = plan.descriptor, slab.slots[index]
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
        complete[index] = plan
    if not complete:
        slab.close()
        return None
    slots = RankSlots(slab)
    for index, plan in complete.items():
        slots.infos[index].digests = plan.descriptor.digests
        slots.infos[index].recovered = True
        slots.infos[index].elsewhere = plan.is_in_slot
    return slots


def _fill(slab: Slab, index: int, descriptor: SlotDescriptor, piece: _Piece, ask: Ask) -> None:
    """Read a range from all nodes that have a part in it, and write it into a slot.

    Raises:
        PeerError: a node is gone, or no longer has its part.
    """
    with contextlib.ExitStack() as opened:
        answers = [
            opened.enter_context(ask(read.node))(_requests(read, piece)) for read in piece.reads
        ]
        for (at, size), *replies in zip(_steps(piece), *answers, strict=True):
            total = bytearray(size)
            for reply, data in replies:
                if not isinstance(reply, m.Taken):
                    raise PeerError(getattr(reply, "reason", f"answered {reply!r}"))
                if len(replies) == 1:
                    total[: len(data)] = data
                elif len(data):
                    combine(total, 0, data)
            slot_bytes.write(slab, index, descriptor, piece.start + at, memoryview(total))


def _requests(read: _Read, piece: _Piece) -> Iterator[m.Request]:
    for at, size in _steps(piece):
        # A part that is shorter than the others is padded with zeros.
        yield read.request(at, max(0, min(size, read.nbytes - at)))


def _steps(piece: _Piece) -> Iterator[tuple[int, int]]:
    return slot_bytes.steps(0, piece.end - piece.start)
