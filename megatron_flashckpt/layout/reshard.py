"""Intersection of two runs of boxes: the arithmetic of loading under another layout.

A run is a half-open range of a row-major flattened box. One rank stored a run of one box, another
rank wants a run of another box of the same tensor. A run divides into a few boxes (`blocks`), boxes
intersect in boxes, and a common box is a strided block of either run (`regions`).

All numbers count elements, and all functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megatron_flashckpt.layout.piece import Piece, Shape

Box = tuple[Shape, Shape]
"""Offset and shape."""


class Run(NamedTuple):
    """Elements `[start, end)` of the row-major flattening of a box of a global tensor."""

    offset: Shape
    shape: Shape
    start: int
    end: int

    @classmethod
    def of(cls, piece: Piece) -> Run:
        return cls(piece.offset, piece.shape, piece.start, piece.end)


class Region(NamedTuple):
    """The same elements of two runs, as strided blocks counted from the start of each run."""

    shape: Shape
    source_start: int
    source_strides: Shape
    target_start: int
    target_strides: Shape

    @property
    def gapless(self) -> bool:
        """True if the block is contiguous in both runs."""
        return self.source_strides == self.target_strides == (1,)


class Overlap(NamedTuple):
    """The part of a stored run that a wanted run needs."""

    numel: int
    low: int
    high: int
    """The needed elements lie in `[low, high)` of the flattening of the stored box."""


def blocks(shape: Shape, start: int, end: int) -> Iterator[Box]:
    """Yield the boxes (at most `2 * axes - 1`) that tile elements `[start, end)` of `shape`."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, into = divmod(start, row)
    last, rest = divmod(end, row)
    if into == 0 and rest == 0:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
        return
    if first == last:
        yield from _in_row(first, shape, into, rest)
        return
    if into:
        yield from _in_row(first, shape, into, row)
        first += 1
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if rest:
        yield from _in_row(last, shape, 0, rest)


def _in_row(number: int, shape: Shape, start: int, end: int) -> Iterator[Box]:
    for offset, extent in blocks(shape[1:], start, end):
        yield (number, *offset), (1, *extent)


def intersection(one: Box, other: Box) -> Box | None:
    """Return the common box of `one` and `other`, or None if they are disjoint."""
    offset, shape = [], []
    for low, n, other_low, other_n in zip(*one, *other, strict=True):
        start, end = max(low, other_low), min(low + n, other_low + other_n)
        if start >= end:
            return None
        offset.append(start)
        shape.append(end - start)
    return tuple(offset), tuple(shape)


def overlap(stored: Run, wanted: Run) -> Overlap:
    """Return the overlap of two runs of the same global tensor."""
    if stored[:2] == wanted[:2]:
        low, high = max(stored.start, wanted.start), min(stored.end, wanted.end)
        return Overlap(max(high - low, 0), low, high)
    numel, low, high = 0, stored.end, stored.start
    strides = _strides(stored.shape)
    for offset, shape in _common(stored, wanted):
        first = _flat(offset, stored.offset, strides)
        last = first + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        numel += math.prod(shape)
        low, high = min(low, first), max(high, last + 1)
    return Overlap(numel, low, high)


def regions(stored: Run, wanted: Run) -> list[Region]:
    """Return the common elements of both runs as disjoint strided blocks."""
    if stored[:2] == wanted[:2]:
        low, high = max(stored.start, wanted.start), min(stored.end, wanted.end)
        if low >= high:
            return []
        return [Region((high - low,), low - stored.start, (1,), low - wanted.start, (1,))]
    source_strides, target_strides = _strides(stored.shape), _strides(wanted.shape)
    merged: list[Region] = []
    for offset, shape in _common(stored, wanted):
        extents, source_steps, target_steps = _flattened(shape, source_strides, target_strides)
        source_start = _flat(offset, stored.offset, source_strides) - stored.start
        target_start = _flat(offset, wanted.offset, target_strides) - wanted.start
        region = Region(extents, source_start, source_steps, target_start, target_steps)
        if merged and _continues(merged[-1], region):
            merged[-1] = merged[-1]._replace(shape=(merged[-1].shape[0] + extents[0],))
        else:
            merged.append(region)
    return merged


def _continues(before: Region, after: Region) -> bool:
    """Return whether both regions form one contiguous block (the rest of a row, then rows)."""
    (n, *_) = before.shape
    return (
        before.gapless
        and after.gapless
        and before.source_start + n == after.source_start
        and before.target_start + n == after.target_start
    )


def _common(stored: Run, wanted: Run) -> Iterator[Box]:
    """Yield the common elements of both runs as disjoint boxes in global coordinates."""
    if intersection(stored[:2], wanted[:2]) is None:
        return
    needed = [_global(block, wanted) for block in blocks(wanted.shape, wanted.start, wanted.end)]
    for block in blocks(stored.shape, stored.start, stored.end):
        stored_box = _global(block, stored)
        for wanted_box in needed:
            common = intersection(stored_box, wanted_box)
            if common is not None:
                yield common


def _global(block: Box, run: Run) -> Box:
    return tuple(a + b for a, b in zip(run.offset, block[0], strict=True)), block[1]


def _strides(shape: Shape) -> Shape:
    strides = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _flat(offset: Shape, origin: Shape, strides: Shape) -> int:
    return sum((a - b) * step for a, b, step in zip(offset, origin, strides, strict=True))


def _flattened(shape: Shape, one: Shape, other: Shape) -> tuple[Shape, Shape, Shape]:
    """Return extents and strides; axes that are contiguous on both sides are merged."""
    merged: list[tuple[int, int, int]] = []
    for n, step, other_step in zip(shape, one, other, strict=True):
        if n == 1:
            continue
        if merged and merged[-1][1:] == (n * step, n * other_step):
            merged[-1] = (merged[-1][0] * n, step, other_step)
        else:
            merged.append((n, step, other_step))
    if not merged:
        return (1,), (1,), (1,)
    extents, strides, other_strides = zip(*merged, strict=True)
    return extents, strides, other_strides
