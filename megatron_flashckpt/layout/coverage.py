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
from megatron_flashckpt.layout.piece import Piece, Shape
from megatron_flashckpt.layout.plan import Placement, Template, TemplateItem, placement_length
from megatron_flashckpt.layout.reshard import Run, intersection, overlap

_Numbers = npt.NDArray[np.int64]
_Name = tuple[str, str]
"""Kind and key."""


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
        LayoutError: the stored geometry contradicts itself.
    """
    stored = _stored(sources, {(piece.kind, piece.key) for piece in wanted})
    problems = {f"{name}: in the checkpoint, not in the model": None for name in sorted(unwanted)}
    reads: dict[int, list[Read]] = defaultdict(list)
    padded = []
    for index, piece in enumerate(wanted):
        columns = stored.get((piece.kind, piece.key))
        problem = _misfit(piece, columns, index in resizable)
        if columns is not None and problem is None:
            numel = _stored_numel(piece, columns)
            found = _fill(index, piece, columns)
            if found is None or sum(part for _, part, _ in found) != numel:
                problem = (
                    f"elements {piece.start} to {piece.end} of the box at {piece.offset} are not "
                    "there exactly once"
                )
            else:
                for rank, _, read in found:
                    reads[rank].append(read)
            if numel < piece.numel:
                padded.append(index)
        if problem is not None:
            problems[f"{piece.kind}/{piece.key}: {problem}"] = None
    if problems:
        raise MissingStateError(
            f"{place} does not hold what this model needs ({len(problems)} differences):\n  "
            + "\n  ".join(problems)
            + "\nUse the model settings of the run that saved it (the parallel sizes are free), or "
            "--ckpt-step for another iteration; nothing was loaded"
        )
    for each in reads.values():
        each.sort()
    return ReadPlan(dict(reads), tuple(padded))


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
    """All stored runs of one tensor: row `i` of every column is run `i`."""

    variants: frozenset[tuple[Shape, str]]
    """Every global shape and type that it has on some rank. Side state differs in length from rank
    to rank; of a tensor of the model there is one, or no whole one."""
    offset: _Numbers
    shape: _Numbers
    start: _Numbers
    end: _Numbers
    byte_offset: _Numbers
    rank: _Numbers

    def run(self, row: int) -> Run:
        offset, shape = self.offset[row].tolist(), self.shape[row].tolist()
        return Run(tuple(offset), tuple(shape), int(self.start[row]), int(self.end[row]))


def _stored(sources: Iterable[Source], names: set[_Name]) -> dict[_Name, _Columns]:
    """Return the columns of the tensors `names`, as far as they are stored."""
    sharing: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        sharing[id(source.template)].append(source)
    parts: dict[_Name, list[tuple[_Numbers, ...]]] = defaultdict(list)
    variants: dict[_Name, dict[tuple[Shape, str], None]] = defaultdict(dict)
    for users in sharing.values():
        items = users[0].template.items
        numbers = _placements(users, placement_length(items))
        ranks = np.array([user.rank for user in users], dtype=np.int64)
        position = 0
        for item in items:
            low, position = position, position + len(item.shape) + 1
            name = (item.kind, item.key)
            if name not in names:
                continue
            if len(item.shape) != len(item.global_shape):
                raise LayoutError(f"{item.kind}/{item.key}: box and tensor differ in axes")
            variants[name][item.global_shape, item.dtype] = None
            start = numbers[:, position - 1]
            rows = len(users)
            shape = np.broadcast_to(np.array(item.shape, np.int64), (rows, len(item.shape)))
            offset = numbers[:, low : position - 1]
            byte_offset = np.full(rows, item.byte_offset)
            parts[name].append((offset, shape, start, start + item.numel, byte_offset, ranks))
    found = {}
    for name, said in variants.items():
        if len({len(shape) for shape, _ in said}) > 1:
            raise LayoutError(f"{name[0]}/{name[1]}: ranks do not agree how many axes it has")
        columns = map(np.concatenate, zip(*parts[name], strict=True))
        found[name] = _Columns(frozenset(said), *columns)
    return found


def _placements(users: list[Source], length: int) -> _Numbers:
    """Return the placements of ranks that share a template, one row per rank."""
    try:
        numbers = np.array([user.placement for user in users], dtype=np.int64)
        return numbers.reshape(len(users), length)
    except (ValueError, OverflowError) as error:
        raise LayoutError(f"placements do not fit their template ({error})") from error


# ---------------------------------------------------------------------- one wanted piece


def _misfit(piece: Piece, columns: _Columns | None, resizable: bool) -> str | None:
    """Return why nothing stored can fill `piece`, whatever its cut; None if something may."""
    if columns is None:
        return f"not in the checkpoint; the model has shape {piece.global_shape}"
    if (piece.global_shape, piece.dtype) in columns.variants:
        return None
    ((shape, dtype), *others) = columns.variants
    if resizable and not others and dtype == piece.dtype and len(shape) == len(piece.shape):
        return None
    found = ", ".join(f"{shape} {dtype}" for shape, dtype in sorted(columns.variants))
    return f"{found} in the checkpoint, {piece.global_shape} {piece.dtype} in the model"


def _stored_numel(piece: Piece, columns: _Columns) -> int:
    """Return how many elements of `piece` lie in the stored tensor, whose shape may differ."""
    if (piece.global_shape, piece.dtype) in columns.variants:
        return piece.numel
    ((shape, _),) = columns.variants
    whole = Run((0,) * len(shape), shape, 0, math.prod(shape))
    return overlap(whole, Run.of(piece)).numel


def _fill(index: int, piece: Piece, columns: _Columns) -> list[tuple[int, int, Read]] | None:
    """Return `(source rank, elements, read)` of all runs that meet `piece`; None if two overlap."""
    wanted = Run.of(piece)
    size = itemsize(piece.dtype)
    offset, shape = np.array(piece.offset, np.int64), np.array(piece.shape, np.int64)
    low = np.maximum(columns.offset, offset)
    high = np.minimum(columns.offset + columns.shape, offset + shape)
    meets = (low < high).all(axis=1)
    # In the same box, a run of other elements is told from its range: most rows go here.
    same = ((columns.offset == offset) & (columns.shape == shape)).all(axis=1)
    meets &= ~same | ((columns.start < piece.end) & (columns.end > piece.start))
    found = []
    runs = []
    for row in np.flatnonzero(meets).tolist():
        run = columns.run(row)
        common = overlap(run, wanted)
        if not common.numel:
            continue
        runs.append(run)
        read = Read(
            int(columns.byte_offset[row]) + (common.low - run.start) * size,
            (common.high - common.low) * size,
            index,
            run._replace(start=common.low, end=common.high),
        )
        found.append((int(columns.rank[row]), common.numel, read))
    return None if _any_overlap(runs) else found


def _any_overlap(runs: list[Run]) -> bool:
    """Return whether an element is in two of `runs`."""
    boxes: dict[tuple[Shape, Shape], list[tuple[int, int]]] = defaultdict(list)
    for run in runs:
        boxes[run.offset, run.shape].append((run.start, run.end))
    for ranges in boxes.values():
        ranges.sort()
        if any(after[0] < before[1] for before, after in itertools.pairwise(ranges)):
            return True
    distinct = sorted(boxes)
    return any(intersection(*pair) is not None for pair in itertools.combinations(distinct, 2))
