"""Copies of one tensor on several ranks, all of which a save stores.

Tensor-parallel ranks each hold a copy of norm weights, biases and routers. Copies drift apart in
training if nothing reduces their gradients, so a job resumes bit for bit only if each rank gets its
own copy. One rank's copy is the *main* copy, stored as the tensor itself; layouts that have no such
rank load it.

The other copies are stored as parts of one larger tensor, of kind `kind@`: two axes, the numbers of
a copy over stages and over tensor ranks, precede those of the tensor. No kind or shape tells which
rank holds a copy. So the templates of a tensor group stay equal; placements hold the numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from megatron_flashckpt.layout.piece import Piece, Shape

_MARK = "@"
#: Number of the axes that precede those of the tensor.
AXES = 2


class CopyPlace(NamedTuple):
    """Position of one rank's copy among all copies of a tensor."""

    offset: Shape
    """Numbers of the copy over pipeline stages and over tensor ranks; all zero for the main one."""
    shape: Shape
    """Upper bounds of these numbers, which are equal on all ranks."""


def copy_kind(kind: str) -> str:
    """Return the kind under which copies other than the main copy are stored."""
    return f"{kind}{_MARK}"


def main_kind(kind: str) -> str:
    """Return the kind of the main copy, for the kind of any copy."""
    return kind.removesuffix(_MARK)


def is_copy(kind: str) -> bool:
    """Return whether `kind` marks copies other than the main copy."""
    return kind.endswith(_MARK)


def row_axis(kind: str) -> int:
    """Return the axis of a tensor's rows in the global shape of `kind`."""
    return AXES if is_copy(kind) else 0


def as_copy(piece: Piece, place: CopyPlace) -> Piece:
    """Return the piece that holds the elements of `piece`, of the main copy, in another copy."""
    return Piece(
        piece.key,
        copy_kind(piece.kind),
        piece.dtype,
        (*place.shape, *piece.global_shape),
        (*place.offset, *piece.offset),
        (*(1,) * AXES, *piece.shape),
        piece.start,
        piece.end,
    )


def place_of(global_shape: Shape, offset: Shape) -> CopyPlace:
    """Return the place of a stored copy, from the global shape and offset of one of its pieces."""
    return CopyPlace(offset[:AXES], global_shape[:AXES])


def split(piece: Piece) -> tuple[CopyPlace | None, Piece]:
    """Return the place of a stored copy and the piece of the main copy: the inverse of `as_copy`.

    The place is None if `piece` is of a main copy.
    """
    if not is_copy(piece.kind):
        return None, piece
    main = msgspec.structs.replace(
        piece,
        kind=main_kind(piece.kind),
        global_shape=piece.global_shape[AXES:],
        offset=piece.offset[AXES:],
        shape=piece.shape[AXES:],
    )
    return place_of(piece.global_shape, piece.offset), main
