"""Hypothesis strategies for pieces; shared by the tests of geometry, plans and formats."""

from __future__ import annotations

import math

import msgspec
from hypothesis import strategies as st

from megatron_flashckpt.layout.dtypes import ITEMSIZE
from megatron_flashckpt.layout.piece import Piece, Shape
from megatron_flashckpt.layout.reshard import Box
from megatron_flashckpt.layout.template import Layout, PlanCache, order

dtypes = st.sampled_from(sorted(ITEMSIZE))
#: Model code chooses the keys, so any text is possible: the format's separators, quotes, scripts.
keys = st.text(st.sampled_from('ab./#"\\ é層'), min_size=1, max_size=6)
#: Optimizers choose the names of their states; a slash would end the kind in a tensor's name.
kinds = st.sampled_from(["weight", "master", "exp_avg", "buffer"])


@st.composite
def pieces(draw: st.DrawFn, max_dims: int = 3, max_extent: int = 4) -> Piece:
    """Draw any valid piece, empty pieces and pieces of a scalar included."""
    global_shape, offset, shape = [], [], []
    for _ in range(draw(st.integers(0, max_dims))):
        size = draw(st.integers(0, max_extent))
        low = draw(st.integers(0, size))
        global_shape.append(size)
        offset.append(low)
        shape.append(draw(st.integers(0, size - low)))
    start = draw(st.integers(0, math.prod(shape)))
    end = draw(st.integers(start, math.prod(shape)))
    return Piece(
        draw(keys),
        draw(kinds),
        draw(dtypes),
        tuple(global_shape),
        tuple(offset),
        tuple(shape),
        start,
        end,
    )


@st.composite
def tilings(draw: st.DrawFn, global_shape: Shape) -> list[Box]:
    """Draw boxes that tile a tensor, split one by one along any axis; some may be empty."""
    boxes: list[Box] = [((0,) * len(global_shape), global_shape)]
    for _ in range(draw(st.integers(0, 6)) if global_shape else 0):
        offset, extent = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(global_shape) - 1))
        cut = draw(st.integers(0, extent[axis]))
        first, second = list(extent), list(extent)
        moved = list(offset)
        first[axis], second[axis] = cut, extent[axis] - cut
        moved[axis] += cut
        boxes += [(offset, tuple(first)), (tuple(moved), tuple(second))]
    return boxes


def in_layout_order(unordered: list[Piece]) -> list[Piece]:
    return [unordered[position] for position in order(unordered)]


#: Pieces of one rank, sorted for a layout.
piece_lists = st.lists(pieces(), max_size=8).map(in_layout_order)


def layout_of(ordered: list[Piece]) -> Layout:
    return PlanCache().layout(ordered)


def moved(piece: Piece, rows: int) -> Piece:
    """Return `piece` as a later stage has it: `rows` further down in a taller global tensor."""
    return msgspec.structs.replace(piece, offset=(piece.offset[0] + rows, *piece.offset[1:]))
