"""What all ranks stored of some tensors, as columns of numbers: one row per stored run.

A large job leaves millions of runs, of which one rank needs a few thousand. Rows that cannot meet
what is wanted are left out before anything is looked at one by one.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.layout.piece import Piece, Shape
from megatron_flashckpt.layout.plan import Source, TemplateItem, placement_length
from megatron_flashckpt.layout.reshard import Run

Numbers = npt.NDArray[np.int64]
_Hull = tuple[Numbers, Numbers]
Name = tuple[str, str]
"""Kind and key."""
Variant = tuple[Shape, str]
"""Global shape and element type."""
_OLDER = "load an older iteration with --ckpt-step"
#: The sum of two numbers below it fits into 64 bits.
_LIMIT = 2**62


@dataclasses.dataclass(frozen=True)
class Columns:
    """Stored runs of one tensor: row `i` of every column is run `i`."""

    offset: Numbers
    shape: Numbers
    start: Numbers
    end: Numbers
    low: Numbers
    high: Numbers
    """The smallest box that holds the run: from `low` to `high` along every axis."""
    byte_offset: Numbers
    rank: Numbers

    def run(self, row: int) -> Run:
        offset, shape = self.offset[row].tolist(), self.shape[row].tolist()
        return Run(tuple(offset), tuple(shape), int(self.start[row]), int(self.end[row]))


def hulls(wanted: list[Piece]) -> dict[Name, _Hull]:
    """Return the smallest box, as low and high corner, that holds all that is wanted by name."""
    corners: dict[Name, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for piece in wanted:
        high = [low + n for low, n in zip(piece.offset, piece.shape, strict=True)]
        corners[piece.kind, piece.key].append((list(piece.offset), high))
    return {
        name: (
            np.array([low for low, _ in both], np.int64).min(axis=0),
            np.array([high for _, high in both], np.int64).max(axis=0),
        )
        for name, both in corners.items()
    }


def stored_columns(
    sources: Iterable[Source], hulls: dict[Name, _Hull], place: str
) -> dict[Name, dict[Variant, Columns]]:
    """Return the runs that meet the `hulls` of the tensors they belong to, by shape and type.

    Side state has another length, so another global shape, on every rank. Of a tensor of the model
    there is one variant, unless ranks contradict each other.
    """
    sharing: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        sharing[id(source.template)].append(source)
    found: dict[Name, dict[Variant, list[Columns]]] = defaultdict(lambda: defaultdict(list))
    for users in sharing.values():
        items = users[0].template.items
        numbers = _placements(users, placement_length(items), place)
        ranks = np.array([user.rank for user in users], dtype=np.int64)
        for item in items:
            hull = hulls.get((item.kind, item.key))
            if hull is not None:
                columns = _columns(item, numbers[:, item.place], ranks, hull, place)
                found[item.kind, item.key][item.global_shape, item.dtype].append(columns)
    return {
        name: {variant: _joined(parts) for variant, parts in variants.items()}
        for name, variants in found.items()
    }


def _placements(users: list[Source], length: int, place: str) -> Numbers:
    """Return the placements of ranks that share a template, one row per rank."""
    try:
        numbers = np.array([user.placement for user in users], dtype=np.int64)
        return numbers.reshape(len(users), length)
    except (ValueError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"{place}: placements do not fit their template ({error}); {_OLDER}"
        ) from error


def _columns(
    item: TemplateItem, placed: Numbers, ranks: Numbers, hull: _Hull, place: str
) -> Columns:
    """Return the runs that `item` is on `ranks`, as far as they meet `hull`.

    Args:
        placed: per rank the offset of its box and the start of its range.
    """
    problem = f"{item.kind}/{item.key} lies outside of its box, tensor or file"
    if not _possible(item):
        raise CorruptCheckpointError(f"{place}: {problem} on rank {ranks[0]}; {_OLDER}")
    shape = np.array(item.shape, np.int64)
    if len(hull[0]) == len(shape):  # else there is a difference, for which all are of interest
        offset = placed[:, :-1]
        meets = ((offset < hull[1]) & (offset > hull[0] - shape)).all(axis=1)
        placed, ranks = placed[meets], ranks[meets]
    offset, start = placed[:, :-1], placed[:, -1]
    room = np.array(item.global_shape, np.int64) - shape
    outside = ((offset < 0) | (offset > room)).any(axis=1)
    outside |= (start < 0) | (start > math.prod(item.shape) - item.numel)
    if outside.any():
        raise CorruptCheckpointError(f"{place}: {problem} on rank {ranks[outside][0]}; {_OLDER}")
    rows = len(ranks)
    low, high = bounds(offset, item.shape, start, start + item.numel)
    return Columns(
        offset,
        np.broadcast_to(shape, (rows, len(item.shape))),
        start,
        start + item.numel,
        low,
        high,
        np.full(rows, item.byte_offset, np.int64),
        ranks,
    )


def bounds(offset: Numbers, shape: Shape, start: Numbers, end: Numbers) -> tuple[Numbers, Numbers]:
    """Return corners of boxes that hold the runs `[start, end)` of boxes of `shape`.

    They are tight along the first axis that has an extent: the distributed optimizer cuts a layer's
    matrix into bands of rows.
    """
    low, high = offset.copy(), offset + np.array(shape, np.int64)
    for axis, n in enumerate(shape):
        if n != 1:
            row = max(math.prod(shape[axis + 1 :]), 1)
            low[:, axis] = offset[:, axis] + start // row
            high[:, axis] = offset[:, axis] - (-end // row)
            break
    return low, high


def _possible(item: TemplateItem) -> bool:
    """Return whether `item` can lie anywhere, and be counted in 64 bits."""
    return (
        len(item.shape) == len(item.global_shape)
        and all(
            0 <= n <= size < _LIMIT for n, size in zip(item.shape, item.global_shape, strict=True)
        )
        and 0 <= item.numel <= math.prod(item.shape) < _LIMIT
        and 0 <= item.byte_offset < _LIMIT
    )


def _joined(parts: list[Columns]) -> Columns:
    fields = [field.name for field in dataclasses.fields(Columns)]
    return Columns(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))
