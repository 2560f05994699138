"""Finds copies of a rank's checkpoints in the memory of other nodes, and reads them.

Recovery goes by ranks, not by nodes: after a node was replaced, the launcher may assign a rank to
another node. So every agent reports its slots, copies and parity of a rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from megatron_flashckpt.agent import slot_bytes
from megatron_flashckpt.agent.peers import messages as m
from megatron_flashckpt.agent.peers.holdings import combine
from megatron_flashckpt.agent.peers.transport import PeerError
from megatron_flashckpt.agent.slot_bytes import Copy, SlotDescriptor
from megatron_flashckpt.memory.slab import Slab

#: Sends requests to one node, a few ahead; yields the replies in order.
Pipeline = Callable[[Iterable[m.Request]], Iterator[tuple[m.Reply, bytes | memoryview]]]
#: Opens a pipeline to a node for the duration of the context.
Ask = Callable[[int], contextlib.AbstractContextManager[Pipeline]]


@dataclasses.dataclass(frozen=True)
class _Read:
    """A byte range that one node has."""

    node: int
    request: m.ReadSlot | m.ReadHeld
    """The request for all of the range."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A range of a checkpoint: the exclusive or of its reads."""

    start: int
    end: int
    reads: tuple[_Read, ...]


def copies(rank: int, replies: Mapping[int, m.Found], ask: Ask) -> dict[str, Copy]:
    """Return by save what the nodes hold of `rank` completely, given the replies per node."""
    slots = {slot: node for node, reply in replies.items() for slot in reply.slots}
    by_save: dict[str, Copy] = {}
    held: dict[str, list[tuple[int, m.Held]]] = {}
    for node, reply in sorted(replies.items()):
        for descriptor in reply.labels:
            read = _Read(node, m.ReadSlot(rank, descriptor.save_id, 0, descriptor.nbytes))
            pieces = [_Piece(0, descriptor.nbytes, (read,))]
            by_save[descriptor.save_id] = _copy(descriptor, pieces, ask, is_in_slot=True)
        for combined in reply.held:
            held.setdefault(combined.label.save_id, []).append((node, combined))
    for save_id, parts in held.items():
        combined_pieces = _combined(parts, slots)
        if combined_pieces is not None:
            by_save.setdefault(save_id, _copy(parts[0][1].label, combined_pieces, ask))
    return by_save


def _copy(
    descriptor: SlotDescriptor, pieces: list[_Piece], ask: Ask, *, is_in_slot: bool = False
) -> Copy:
    nodes = sorted({read.node for piece in pieces for read in piece.reads})
    fill = functools.partial(_fill, descriptor=descriptor, pieces=pieces, ask=ask)
    return Copy(descriptor, f"nodes {', '.join(map(str, nodes))}", fill, is_in_slot)


def _combined(
    parts: list[tuple[int, m.Held]], slots: Mapping[tuple[int, str], int]
) -> list[_Piece] | None:
    """Return the pieces that are read from their holders; None if a part is missing."""
    descriptor = parts[0][1].label
    pieces = {}
    for node, held in parts:
        start, end = held.part.bounds(descriptor.nbytes)
        of_holder = m.ReadHeld(held.part.parity_group, descriptor.save_id, 0, end - start)
        reads = [_Read(node, of_holder)]
        for other, low, high in held.others:
            if (other, descriptor.save_id) not in slots:
                break
            owner = slots[other, descriptor.save_id]
            of_slot = m.ReadSlot(other, descriptor.save_id, low, high - low)
            reads.append(_Read(owner, of_slot))
        else:
            pieces[held.part.index] = _Piece(start, end, tuple(reads))
    return list(pieces.values()) if len(pieces) == parts[0][1].part.count else None


def _fill(
    slab: Slab, index: int, *, descriptor: SlotDescriptor, pieces: list[_Piece], ask: Ask
) -> None:
    """Read each range from all nodes that have a part in it, and write it into a slot.

    Raises:
        PeerError: a node is gone, or no longer has its part.
    """
    for piece in pieces:
        _fill_piece(slab, index, descriptor, piece, ask)


def _fill_piece(
    slab: Slab, index: int, descriptor: SlotDescriptor, piece: _Piece, ask: Ask
) -> None:
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
    whole = read.request
    for at, size in _steps(piece):
        # A part that is shorter than the others is padded with zeros.
        nbytes = max(0, min(size, whole.nbytes - at))
        yield msgspec.structs.replace(whole, start=whole.start + at, nbytes=nbytes)


def _steps(piece: _Piece) -> Iterator[tuple[int, int]]:
    return m.steps(0, piece.end - piece.start)
