"""Index of the runs that all ranks stored: one row per run, columns of numbers.

A large job stores millions of runs, and one rank needs a few thousand of them. Vectorised
comparisons drop the rows that cannot overlap the wanted pieces before any row is visited singly.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_flashckpt.errors import OLDER, CorruptCheckpointError
from megatron_flashckpt.layout.piece import Piece, Shape
from megatron_flashckpt.layout.reshard import Box, Run
from megatron_flashckpt.layout.template import Source, TemplateItem, placement_length

Numbers = npt.NDArray[np.int64]
_Hull = tuple[Shape, Shape]
"""Low and high corner of a box."""
#: Hull with which all runs of a tensor overlap: it has no axes to compare.
ANYWHERE: _Hull = ((), ())
Name = tuple[str, str]
"""Kind and key."""
Variant = tuple[Shape, str]
"""Global shape and element type."""
#: Upper bound of stored numbers: the sum of two smaller numbers fits into 64 bits.
LIMIT = 2**62
#: Up to this many ranks per template, and runs per tensor, plain loops are used: making arrays
#: takes longer than it saves.
_FEW_USERS, _FEW_ROWS = 8, 64


class StoredRun(NamedTuple):
    """Run that a rank stored, with its byte offset in the rank's data section."""

    rank: int
    byte_offset: int
    run: Run


class Rows(list[StoredRun]):
    """Stored runs of one tensor, for templates that few ranks share."""

    def overlapping(self, wanted: Run) -> list[StoredRun]:
        """Return all runs that overlap `wanted`, possibly with others."""
        if len(self) <= 1:
            return self
        # Under the saved layout the box is equal, and disjoint from all others.
        if (
            self._runs_by_box is not None
            and (equal_box := self._runs_by_box.get(wanted[:2])) is not None
        ):
            return equal_box
        if len(self) > _FEW_ROWS:
            return self._columns.overlapping(wanted)
        low, high = bounds(wanted)
        pairs = zip(self, self._bounds, strict=True)
        return [row for row, row_bounds in pairs if _hulls_overlap(*row_bounds, low, high)]

    @functools.cached_property
    def _runs_by_box(self) -> dict[Box, list[StoredRun]] | None:
        """The runs by box; None if boxes may overlap.

        Boxes are disjoint if all have one shape and start at multiples of it, which holds in nearly
        every layout.
        """
        shape = self[0].run.shape
        by_box: dict[Box, list[StoredRun]] = defaultdict(list)
        for row in self:
            run = row.run
            if run.shape != shape or not all(shape) or any(map(operator.mod, run.offset, shape)):
                return None
            by_box[run[:2]].append(row)
        return by_box

    @functools.cached_property
    def _bounds(self) -> list[_Hull]:
        return [bounds(row.run) for row in self]

    @functools.cached_property
    def _columns(self) -> Columns:
        return Columns.of(self)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Stored runs of one tensor: row `i` of every column is run `i`."""

    rank: Numbers
    byte_offset: Numbers
    offset: Numbers
    shape: Numbers
    start: Numbers
    end: Numbers
    low: Numbers
    high: Numbers

    @classmethod
    def of(cls, rows: Rows) -> Columns:
        ranks, byte_offsets, runs = zip(*rows, strict=True)
        lows, highs = zip(*map(bounds, runs), strict=True)
        columns = (ranks, byte_offsets, *zip(*runs, strict=True), lows, highs)
        return cls(*(np.array(column, np.int64) for column in columns))

    def overlapping(self, wanted: Run) -> list[StoredRun]:
        """Return all runs that overlap `wanted`, possibly with others."""
        low, high = bounds(wanted)
        overlaps = ((self.low < np.array(high)) & (self.high > np.array(low))).all(axis=1)
        return [self._row(row) for row in np.flatnonzero(overlaps).tolist()]

    def _row(self, row: int) -> StoredRun:
        offset, shape = (tuple(column[row].tolist()) for column in (self.offset, self.shape))
        run = Run(offset, shape, int(self.start[row]), int(self.end[row]))
        return StoredRun(int(self.rank[row]), int(self.byte_offset[row]), run)


def hulls(wanted: list[Piece]) -> dict[Name, _Hull]:
    """Return, by name, the low and high corner of the smallest box around all wanted pieces."""
    corners: dict[Name, _Hull] = {}
    for piece in wanted:
        name = piece.kind, piece.key
        low, high = piece.offset, tuple(map(operator.add, piece.offset, piece.shape))
        if name in corners:
            low = tuple(map(min, low, corners[name][0]))
            high = tuple(map(max, high, corners[name][1]))
        corners[name] = low, high
    return corners


def stored_columns(
    sources: Iterable[Source], hulls: dict[Name, _Hull], place: str
) -> dict[Name, dict[Variant, Rows | Columns]]:
    """Return the runs that overlap the `hulls` of their tensors, by global shape and type.

    Side state has a different length, hence a different global shape, on every rank. A tensor of
    the model has one shape (otherwise ranks contradict each other) and may have layers of several
    types.
    """
    sharing: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        sharing[id(source.template)].append(source)
    tensors: dict[Name, dict[Variant, list[Rows | Columns]]]
    tensors = defaultdict(lambda: defaultdict(list))
    for users in sharing.values():
        items = users[0].template.items
        numbers = _placements(users, placement_length(items), place)
        ranks = np.array([user.rank for user in users], dtype=np.int64)
        few = len(users) <= _FEW_USERS
        for item in items:
            hull = hulls.get((item.kind, item.key))
            if hull is None:
                continue
            if not _possible(item):
                raise outside_error(item, users[0].rank, place)
            part: Rows | Columns
            if few:
                part = _rows(item, users, hull, place)
            else:
                part = _columns(item, numbers[:, item.place], ranks, hull, place)
            tensors[item.kind, item.key][item.global_shape, item.dtype].append(part)
    return {
        name: {variant: _joined(parts) for variant, parts in variants.items()}
        for name, variants in tensors.items()
    }


def _placements(users: list[Source], length: int, place: str) -> Numbers:
    """Return the placements of ranks that share a template, one row per rank."""
    try:
        numbers = np.array([user.placement for user in users], dtype=np.int64)
        return numbers.reshape(len(users), length)
    except (ValueError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"{place}: placements do not fit their template ({error}); {OLDER}"
        ) from error


def outside_error(item: TemplateItem, rank: int, place: str) -> CorruptCheckpointError:
    """Return the error for an `item` whose position on `rank` is impossible."""
    return CorruptCheckpointError(
        f"{place}: {item.kind}/{item.key} lies outside of its box, tensor or file on rank {rank}; "
        f"{OLDER}"
    )


def _rows(item: TemplateItem, users: list[Source], hull: _Hull, place: str) -> Rows:
    """Return the runs of `item` on the ranks of `users` that overlap `hull`."""
    rows = Rows()
    shape, where = item.shape, item.place
    last_start = math.prod(shape) - item.numel
    comparable = len(hull[0]) == len(shape)
    for user in users:
        *corner, start = user.placement[where]
        offset = tuple(corner)
        far = tuple(map(operator.add, offset, shape))
        if comparable and not _hulls_overlap(offset, far, *hull):
            continue
        if (
            not 0 <= start <= last_start
            or min(offset, default=0) < 0
            or any(map(operator.gt, far, item.global_shape))
        ):
            raise outside_error(item, user.rank, place)
        run = Run(offset, shape, start, start + item.numel)
        rows.append(StoredRun(user.rank, item.byte_offset, run))
    return rows


def _hulls_overlap(low: Shape, high: Shape, other_low: Shape, other_high: Shape) -> bool:
    return all(map(operator.lt, low, other_high)) and all(map(operator.gt, high, other_low))


def _columns(
    item: TemplateItem, placed: Numbers, ranks: Numbers, hull: _Hull, place: str
) -> Columns:
    """Return the runs of `item` that overlap `hull`, vectorised for many ranks (see `_rows`).

    Args:
        placed: one row per rank: the offset of its box, then the start of its range.
    """
    shape = np.array(item.shape, np.int64)
    if len(hull[0]) == len(shape):  # otherwise shapes differ, and the error lists all runs
        offset = placed[:, :-1]
        low, high = (np.array(corner, np.int64) for corner in hull)
        overlaps = ((offset < high) & (offset > low - shape)).all(axis=1)
        placed, ranks = placed[overlaps], ranks[overlaps]
    offset, start = placed[:, :-1], placed[:, -1]
    room = np.array(item.global_shape, np.int64) - shape
    outside = ((offset < 0) | (offset > room)).any(axis=1)
    outside |= (start < 0) | (start > math.prod(item.shape) - item.numel)
    if outside.any():
        raise outside_error(item, ranks[outside][0], place)
    rows = len(ranks)
    low, high = offset.copy(), offset + shape
    if (axis := _first_extent(item.shape)) is not None:
        row = max(math.prod(item.shape[axis + 1 :]), 1)
        low[:, axis] = offset[:, axis] + start // row
        high[:, axis] = offset[:, axis] - (-(start + item.numel) // row)
    return Columns(
        ranks,
        np.full(rows, item.byte_offset, np.int64),
        offset,
        np.broadcast_to(shape, (rows, len(item.shape))),
        start,
        start + item.numel,
        low,
        high,
    )


def bounds(run: Run) -> _Hull:
    """Return the low and high corner of a box around `run`.

    The corners are tight along the first axis longer than 1: the distributed optimizer shards a
    layer's matrix into bands of rows.
    """
    low, high = list(run.offset), list(map(operator.add, run.offset, run.shape))
    if (axis := _first_extent(run.shape)) is not None:
        row = max(math.prod(run.shape[axis + 1 :]), 1)
        low[axis] = run.offset[axis] + run.start // row
        high[axis] = run.offset[axis] - (-run.end // row)
    return tuple(low), tuple(high)


def _first_extent(shape: Shape) -> int | None:
    return next((axis for axis, n in enumerate(shape) if n != 1), None)


def _possible(item: TemplateItem) -> bool:
    """Return whether the sizes of `item` are consistent and fit into 64 bits."""
    if len(item.shape) != len(item.global_shape):
        return False
    for n, size in zip(item.shape, item.global_shape, strict=True):
        if not 0 <= n <= size < LIMIT:
            return False
    return 0 <= item.numel <= math.prod(item.shape) < LIMIT and 0 <= item.byte_offset < LIMIT


def _joined(parts: list[Rows | Columns]) -> Rows | Columns:
    if len(parts) == 1:
        return parts[0]
    rows = Rows(row for part in parts if isinstance(part, Rows) for row in part)
    columns = [part for part in parts if isinstance(part, Columns)]
    if not columns:
        return rows
    if rows:
        columns.append(Columns.of(rows))
    fields = [field.name for field in dataclasses.fields(Columns)]
    return Columns(*(np.concatenate([getattr(part, name) for part in columns]) for name in fields))
