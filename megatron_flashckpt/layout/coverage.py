"""Which stored bytes fill which wanted pieces, checked before anything is overwritten.

Stored and wanted pieces may be cut in any way: by other tensor, pipeline, expert and data-parallel
sizes. A rank plans its own reads from the table of contents of all ranks, so what is stored is kept
in columns (one row per stored run) and only the few runs that a wanted piece meets are looked at
one by one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_flashckpt.errors import LayoutError, MissingStateError
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import RANK_STATE, Piece, Shape
from megatron_flashckpt.layout.plan import Placement, Template, TemplateItem, placement_length
from megatron_flashckpt.layout.reshard import Box, Run, intersection, overlap

_Numbers = npt.NDArray[np.int64]
_Hull = tuple[_Numbers, _Numbers]
_Name = tuple[str, str]
"""Kind and key."""
_Variant = tuple[Shape, str]
"""Global shape and element type."""
_OLDER = "load an older iteration with --ckpt-step"
#: The sum of two numbers below it fits into 64 bits.
_LIMIT = 2**62


class Read(NamedTuple):
    """What a wanted piece takes from one stored tensor: `nbytes` bytes at `source_offset`."""

    source_offset: int
    """In the data section of the source rank."""
    nbytes: int
    wanted: int
    """Position among the wanted pieces."""
    stored: Run
    """The elements that those bytes are. Not all need be wanted: a column of a matrix lies between
    others."""


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """How to fill all wanted pieces."""

    reads: dict[int, list[Read]]
    """By source rank, in the order of the file."""
    padded: tuple[int, ...]
    """Wanted pieces that reach beyond the stored tensor (padded vocabulary): zero outside of it."""


class Source(NamedTuple):
    """One rank's stored layout."""

    rank: int
    template: Template
    placement: Placement


def read_plan(
    wanted: list[Piece],
    sources: Collection[Source],
    place: str,
    unwanted: Iterable[str] = (),
    resizable: Collection[int] = (),
) -> ReadPlan:
    """Return the reads that fill `wanted`; every element exactly once.

    Args:
        place: the checkpoint's name, for the message.
        unwanted: names that no rank's model has (see `superfluous`); they are differences too.
        resizable: positions of wanted pieces whose tensor may be stored in another global shape. As
            in Megatron (`allow_shape_mismatch`) the common part counts, the rest is zero.

    Raises:
        MissingStateError: one message with every key that is absent, superfluous, of another shape
            or type, or only partly there.
        LayoutError: something stored lies outside of its own box, tensor or file.
    """
    stored = _stored(sources, _hulls(wanted), place)
    problems = {f"{name}: in the checkpoint, not in the model": None for name in sorted(unwanted)}
    reads: dict[int, list[Read]] = defaultdict(list)
    padded = []
    for index, piece in enumerate(wanted):
        variants = stored.get((piece.kind, piece.key), {})
        shape = _shape_to_read(piece, variants, index in resizable)
        if shape is None:
            problems[f"{piece.kind}/{piece.key}: {_difference(piece, variants)}"] = None
            continue
        numel = _numel_within(piece, shape)
        if numel < piece.numel:
            padded.append(index)
        parts = _parts(index, piece, variants[shape, piece.dtype])
        if sum(part.numel for part in parts) != numel or _any_overlap(parts):
            problems[
                f"{piece.kind}/{piece.key}: elements {piece.start} to {piece.end} of the box at "
                f"{piece.offset} are not there exactly once"
            ] = None
        for part in parts:
            reads[part.rank].append(part.read)
    if problems:
        raise missing_state(place, problems)
    for each in reads.values():
        each.sort()
    return ReadPlan(dict(reads), tuple(padded))


def missing_state(place: str, differences: Collection[str]) -> MissingStateError:
    """Return the error that lists `differences`, which it also carries."""
    error = MissingStateError(
        f"{place} does not hold what this model needs ({len(differences)} differences):\n  "
        + "\n  ".join(differences)
        + "\nUse the model settings of the run that saved it (the parallel sizes are free), or "
        "--ckpt-step for another iteration; nothing was loaded"
    )
    error.differences = tuple(differences)
    return error


def superfluous(wanted: list[Piece], sources: Iterable[Source], kinds: set[str]) -> set[str]:
    """Return `kind/key` of all that is stored (of `kinds`) but not wanted here."""
    mine = {(piece.kind, piece.key) for piece in wanted}
    return {
        f"{item.kind}/{item.key}"
        for item in stored_items(sources)
        if item.kind in kinds and (item.kind, item.key) not in mine
    }


def stored_items(sources: Iterable[Source]) -> Iterable[TemplateItem]:
    """Yield the items of every template once; ranks share templates."""
    templates = {id(source.template): source.template for source in sources}
    for template in templates.values():
        yield from template.items


# ---------------------------------------------------------------------- what is stored, in columns


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Stored runs of one tensor: row `i` of every column is run `i`."""

    offset: _Numbers
    shape: _Numbers
    start: _Numbers
    end: _Numbers
    low: _Numbers
    high: _Numbers
    """The smallest box that holds the run: from `low` to `high` along every axis."""
    byte_offset: _Numbers
    rank: _Numbers

    def run(self, row: int) -> Run:
        offset, shape = self.offset[row].tolist(), self.shape[row].tolist()
        return Run(tuple(offset), tuple(shape), int(self.start[row]), int(self.end[row]))


def _hulls(wanted: list[Piece]) -> dict[_Name, _Hull]:
    """Return the smallest box, as low and high corner, that holds all that is wanted by name."""
    corners: dict[_Name, list[tuple[list[int], list[int]]]] = defaultdict(list)
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


def _stored(
    sources: Iterable[Source], hulls: dict[_Name, _Hull], place: str
) -> dict[_Name, dict[_Variant, _Columns]]:
    """Return the runs that meet the `hulls` of the tensors they belong to, by shape and type.

    Side state has another length, so another global shape, on every rank. Of a tensor of the model
    there is one variant, unless ranks contradict each other.
    """
    sharing: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        sharing[id(source.template)].append(source)
    found: dict[_Name, dict[_Variant, list[_Columns]]] = defaultdict(lambda: defaultdict(list))
    for users in sharing.values():
        items = users[0].template.items
        numbers = _placements(users, placement_length(items), place)
        ranks = np.array([user.rank for user in users], dtype=np.int64)
        position = 0
        for item in items:
            low, position = position, position + len(item.shape) + 1
            hull = hulls.get((item.kind, item.key))
            if hull is not None:
                columns = _columns(item, numbers[:, low:position], ranks, hull, place)
                found[item.kind, item.key][item.global_shape, item.dtype].append(columns)
    return {
        name: {variant: _joined(parts) for variant, parts in variants.items()}
        for name, variants in found.items()
    }


def _placements(users: list[Source], length: int, place: str) -> _Numbers:
    """Return the placements of ranks that share a template, one row per rank."""
    try:
        numbers = np.array([user.placement for user in users], dtype=np.int64)
        return numbers.reshape(len(users), length)
    except (ValueError, OverflowError) as error:
        raise LayoutError(
            f"{place}: placements do not fit their template ({error}); {_OLDER}"
        ) from error


def _columns(
    item: TemplateItem, placed: _Numbers, ranks: _Numbers, hull: _Hull, place: str
) -> _Columns:
    """Return the runs that `item` is on `ranks`, as far as they meet `hull`.

    Args:
        placed: per rank the offset of its box and the start of its range.
    """
    problem = f"{item.kind}/{item.key} lies outside of its box, tensor or file"
    if not _possible(item):
        raise LayoutError(f"{place}: {problem} on rank {ranks[0]}; {_OLDER}")
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
        raise LayoutError(f"{place}: {problem} on rank {ranks[outside][0]}; {_OLDER}")
    rows = len(ranks)
    low, high = _bounds(offset, item.shape, start, start + item.numel)
    return _Columns(
        offset,
        np.broadcast_to(shape, (rows, len(item.shape))),
        start,
        start + item.numel,
        low,
        high,
        np.full(rows, item.byte_offset, np.int64),
        ranks,
    )


def _bounds(
    offset: _Numbers, shape: Shape, start: _Numbers, end: _Numbers
) -> tuple[_Numbers, _Numbers]:
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


def _joined(parts: list[_Columns]) -> _Columns:
    fields = [field.name for field in dataclasses.fields(_Columns)]
    return _Columns(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))


# ---------------------------------------------------------------------- one wanted piece


def _shape_to_read(
    piece: Piece, variants: dict[_Variant, _Columns], resizable: bool
) -> Shape | None:
    """Return the global shape in which `piece` is stored; None if what is stored is not like it."""
    if piece.kind != RANK_STATE and len(variants) > 1:
        return None
    if (piece.global_shape, piece.dtype) in variants:
        return piece.global_shape
    for shape, dtype in variants:
        if resizable and dtype == piece.dtype and len(shape) == len(piece.shape):
            return shape
    return None


def _difference(piece: Piece, variants: Iterable[_Variant]) -> str:
    found = ", ".join(f"{shape} {dtype}" for shape, dtype in sorted(variants))
    if not found:
        return f"not in the checkpoint; the model has shape {piece.global_shape}"
    return f"{found} in the checkpoint, {piece.global_shape} {piece.dtype} in the model"


def _numel_within(piece: Piece, shape: Shape) -> int:
    """Return how many elements of `piece` lie in a tensor of `shape`."""
    if shape == piece.global_shape:
        return piece.numel
    return overlap(Run((0,) * len(shape), shape, 0, math.prod(shape)), Run.of(piece)).numel


class _Part(NamedTuple):
    """What one stored run has of a wanted piece."""

    rank: int
    numel: int
    read: Read


def _parts(index: int, piece: Piece, columns: _Columns) -> list[_Part]:
    """Return what there is of `piece`, the wanted one at position `index`."""
    wanted = Run.of(piece)
    size = itemsize(piece.dtype)
    offset = np.array([piece.offset], np.int64).reshape(1, -1)
    ends = np.array([piece.start], np.int64), np.array([piece.end], np.int64)
    low, high = _bounds(offset, piece.shape, *ends)
    meets = ((columns.low < high) & (columns.high > low)).all(axis=1)
    found = []
    for row in np.flatnonzero(meets).tolist():
        run = columns.run(row)
        common = overlap(run, wanted)
        if common.numel:
            read = Read(
                int(columns.byte_offset[row]) + (common.low - run.start) * size,
                (common.high - common.low) * size,
                index,
                run._replace(start=common.low, end=common.high),
            )
            found.append(_Part(int(columns.rank[row]), common.numel, read))
    return found


def _any_overlap(parts: list[_Part]) -> bool:
    """Return whether an element may be in two of `parts`. Boxes of a tensor never overlap."""
    boxes: dict[Box, list[tuple[int, int]]] = defaultdict(list)
    for part in parts:
        run = part.read.stored
        boxes[run.offset, run.shape].append((run.start, run.end))
    for ranges in boxes.values():
        ranges.sort()
        if any(after[0] < before[1] for before, after in itertools.pairwise(ranges)):
            return True
    return any(intersection(*pair) is not None for pair in itertools.combinations(boxes, 2))
