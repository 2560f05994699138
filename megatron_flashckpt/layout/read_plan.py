"""Plan of a load: the stored bytes that fill each wanted piece, checked before any overwrite.

Stored and wanted pieces may be sharded by different tensor, pipeline, expert and data-parallel
sizes. Each rank plans its own reads from the tables of contents of all ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron_flashckpt.errors import ANOTHER, MissingStateError
from megatron_flashckpt.layout.copies import row_axis
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.exact_match import NOTHING_STORED, StoredPieces
from megatron_flashckpt.layout.piece import BUFFER, RANK_STATE, UNUSED, WEIGHT, Piece, Shape
from megatron_flashckpt.layout.reshard import Box, Run, intersection, overlap
from megatron_flashckpt.layout.stored_index import Columns, Rows, Variant, hulls, stored_columns
from megatron_flashckpt.layout.template import Source, stored_items


class Read(NamedTuple):
    """Contiguous read for a wanted piece: `nbytes` bytes at `source_offset`."""

    source_offset: int
    """In the data section of the source rank."""
    nbytes: int
    wanted: int
    """Position among the wanted pieces."""
    stored: Run
    """The elements in those bytes. Some may be unneeded: a column of a matrix is not contiguous."""

    @classmethod
    def whole(cls, wanted: int, piece: Piece, source_offset: int) -> Read:
        """Return the read of the complete `piece`, which is the wanted piece at index `wanted`."""
        return cls(source_offset, piece.nbytes, wanted, Run.of(piece))


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """The reads that fill all wanted pieces."""

    reads: dict[int, list[Read]]
    """Reads by source rank, in file order."""
    padded: tuple[int, ...]
    """Indices of wanted pieces that extend beyond the stored tensor (padded vocabulary). The excess
    elements are zero."""
    absent: tuple[int, ...] = ()
    """Indices of wanted pieces of which no element is stored; only if `lenient`."""


def read_plan(
    wanted: list[Piece],
    sources: Collection[Source],
    place: str,
    resizable: Collection[int] = (),
    held: StoredPieces = NOTHING_STORED,
    *,
    lenient: bool = False,
) -> ReadPlan:
    """Return the reads that fill every element of `wanted` exactly once.

    Args:
        place: the checkpoint's name, for error messages.
        resizable: indices of wanted pieces whose tensor may be stored with another number of
            rows. As in Megatron (`allow_shape_mismatch`), the common part is read and the rest is
            zero.
        held: result of `pieces_stored_once`; a wanted piece that equals one of them needs no
            search.
        lenient: a piece of which no element is stored is no error. Layers may share a key, so the
            key alone does not tell.

    Raises:
        MissingStateError: lists every key that is missing, incomplete, or of another shape or type.
        CorruptCheckpointError: a stored item lies outside its box, tensor or file.
    """
    reads: dict[int, list[Read]] = defaultdict(list)
    rest = []
    for index, piece in enumerate(wanted):
        source_offset = held.pieces.get(piece)
        if source_offset is None or piece.start == piece.end:
            rest.append(index)
        else:
            reads[held.rank].append(Read.whole(index, piece, source_offset))
    stored = stored_columns(sources, hulls([wanted[i] for i in rest]), place) if rest else {}
    problems: dict[str, None] = {}
    padded, absent = [], []
    for index in rest:
        piece = wanted[index]
        variants = stored.get((piece.kind, piece.key), {})
        shape = _shape_to_read(piece, variants, index in resizable)
        if shape is None:
            problems[f"{piece.kind}/{piece.key}: {_difference(piece, variants)}"] = None
            continue
        numel = _numel_within(piece, shape)
        if numel < piece.numel:
            padded.append(index)
        parts = _parts(index, piece, variants[shape, piece.dtype])
        several = len(variants) > 1 and piece.kind != RANK_STATE
        types = stored_types(piece, variants) if several else []
        if numel and not parts and not types:
            if lenient:
                absent.append(index)
            else:
                problems[f"{piece.kind}/{piece.key}: {_place(piece)} {_ABSENT}"] = None
            continue
        if (
            sum(part.numel for part in parts) != numel
            or not {*types} <= {piece.dtype}
            or _any_overlap(parts)
        ):
            problems[f"{piece.kind}/{piece.key}: {_not_once(piece, types)}"] = None
        for part in parts:
            reads[part.rank].append(part.read)
    if problems:
        raise missing_state(place, problems)
    for rank_reads in reads.values():
        rank_reads.sort()
    return ReadPlan(dict(reads), tuple(padded), tuple(absent))


def stored_names(
    pieces: list[Piece], sources: Collection[Source], place: str
) -> set[tuple[str, str]]:
    """Return kind and key of the pieces of which an element is stored, of any type.

    Raises:
        CorruptCheckpointError: a stored item lies outside its box, tensor or file.
    """
    stored = stored_columns(sources, hulls(pieces), place) if pieces else {}
    names = ((piece, (piece.kind, piece.key)) for piece in pieces)
    return {name for piece, name in names if stored_types(piece, stored.get(name, {}))}


def missing_state(
    place: str, problems: Iterable[str], unexpected: Iterable[str] = (), advice: str = ""
) -> MissingStateError:
    """Return the error that lists all differences; its `differences` holds them too.

    Args:
        problems: one line per tensor that the checkpoint cannot provide.
        unexpected: names of stored tensors that no rank's model has (see `unexpected_tensors`).
        advice: sentence with a remedy for these differences.
    """
    lines = [f"{name}: {_UNEXPECTED}" for name in sorted(unexpected)]
    differences = tuple(dict.fromkeys([*lines, *problems]))
    error = MissingStateError(
        f"{place} does not fit this model ({len(differences)} "
        f"difference{'' if len(differences) == 1 else 's'}):\n  "
        + "\n  ".join(differences)
        + f"\n{advice}Use the model settings of the run that saved it (the parallel sizes are "
        f"free), or {ANOTHER}{''.join(f'; {cure}' for cure in _cures(differences))}; "
        "nothing was loaded"
    )
    error.differences = differences
    return error


_UNEXPECTED = "in the checkpoint, not in the model"
_ABSENT = "are not in the checkpoint"
_NOT_ONCE = "are not stored exactly once"
#: Two element types, of the same shape or of the same elements.
_OTHER_TYPE = re.compile(
    r"(\(.*\)) \w+ in the checkpoint, \1 \w+ in the model$"
    r"| are [\w, ]+ in the checkpoint, \w+ in the model$"
)
_FLOAT = "(F64|F32|F16|BF16)"
#: A weight of another type of floats, which a load of the weights alone converts.
_CONVERTED = re.compile(
    rf"^{WEIGHT}/.*((\(.*\)) {_FLOAT} in the checkpoint, \2| are {_FLOAT} in the checkpoint,) "
    rf"{_FLOAT} in the model$"
)
#: Differences that a load with the optimizer never accepts: another shape or type, or damage.
_LASTING = re.compile(rf"( in the checkpoint, (?!not).* in the model|{_NOT_ONCE})$")


def _cures(differences: Sequence[str]) -> list[str]:
    """Return the flags with which this load, or one of a converted checkpoint, succeeds.

    With each of them none of the differences remains.
    """
    of_weights = [line for line in differences if line.startswith((f"{WEIGHT}/", f"{BUFFER}/"))]
    other_types = [line for line in differences if _OTHER_TYPE.search(line)]
    lasting = [line for line in differences if _LASTING.search(line)]
    cures = []
    if differences and all(_CONVERTED.search(line) for line in of_weights):
        cures.append("--no-load-optim loads the weights alone")
    if not lasting and any(
        "not in the checkpoint" in line or line.endswith(_UNEXPECTED) for line in differences
    ):
        cures.append("--dist-ckpt-strictness log_all loads what both have")
    if other_types and {*lasting, *of_weights} <= {*other_types}:
        cures.append(
            "with --use-distributed-optimizer, a job with those settings and --ckpt-convert-format "
            "torch_dist --ckpt-convert-save DIR --dist-ckpt-optim-fully-reshardable converts it "
            "for another element type"
        )
    return cures


def unexpected_tensors(
    wanted: Collection[tuple[str, str]], sources: Iterable[Source], kinds: set[str]
) -> set[str]:
    """Return `kind/key` of the unexpected tensors: stored, one of `kinds`, and not in `wanted`.

    Parameters that no forward pass uses may stay unread, so they are left out.
    """
    return {
        f"{item.kind}/{item.key}"
        for item in stored_items(sources)
        if item.kind in kinds
        and (item.kind, item.key) not in wanted
        and not item.key.endswith(UNUSED)
    }


def _shape_to_read(piece: Piece, variants: Collection[Variant], resizable: bool) -> Shape | None:
    """Return the stored global shape to read `piece` from; None if shape or type differ.

    Layers that share a key may differ in type, so another type elsewhere in the tensor is accepted.
    Shapes must agree.
    """
    shapes = {shape for shape, _ in variants}
    if piece.kind != RANK_STATE and len(shapes) > 1:
        return None
    if (piece.global_shape, piece.dtype) in variants:
        return piece.global_shape
    rows = row_axis(piece.kind)

    def row_of(shape: Shape) -> Shape:
        return shape[:rows] + shape[rows + 1 :]

    for shape, dtype in variants:
        if resizable and dtype == piece.dtype and row_of(shape) == row_of(piece.global_shape):
            return shape
    return None


def stored_types(piece: Piece, variants: Mapping[Variant, Rows | Columns]) -> list[str]:
    """Return the element types in which parts of `piece` are stored, in order."""
    wanted = Run.of(piece)
    return sorted(
        dtype
        for (_, dtype), stored in variants.items()
        if any(overlap(run, wanted).numel for *_, run in stored.overlapping(wanted))
    )


def _difference(piece: Piece, variants: Iterable[Variant]) -> str:
    stored = ", ".join(f"{shape} {dtype}" for shape, dtype in sorted(variants))
    if not stored:
        return f"not in the checkpoint; the model has shape {piece.global_shape}"
    return f"{stored} in the checkpoint, {piece.global_shape} {piece.dtype} in the model"


def _not_once(piece: Piece, types: list[str]) -> str:
    """Return the error line for elements that have another type or are not stored exactly once."""
    elements = _place(piece)
    if not {*types} <= {piece.dtype}:
        return f"{elements} are {', '.join(types)} in the checkpoint, {piece.dtype} in the model"
    return f"{elements} {_NOT_ONCE}"


def _place(piece: Piece) -> str:
    return f"elements {piece.start} to {piece.end} of the box at {piece.offset}"


def _numel_within(piece: Piece, shape: Shape) -> int:
    """Return the number of elements of `piece` that lie within a tensor of `shape`."""
    if shape == piece.global_shape:
        return piece.numel
    return overlap(Run((0,) * len(shape), shape, 0, math.prod(shape)), Run.of(piece)).numel


class _Part(NamedTuple):
    """The overlap of one stored run with a wanted piece."""

    rank: int
    numel: int
    read: Read


def _parts(index: int, piece: Piece, stored: Rows | Columns) -> list[_Part]:
    """Return the stored parts of `piece`, which is the wanted piece at `index`."""
    wanted = Run.of(piece)
    size = itemsize(piece.dtype)
    parts = []
    for rank, byte_offset, run in stored.overlapping(wanted):
        common = overlap(run, wanted)
        if common.numel:
            read = Read(
                byte_offset + (common.low - run.start) * size,
                (common.high - common.low) * size,
                index,
                Run(run.offset, run.shape, common.low, common.high),
            )
            parts.append(_Part(rank, common.numel, read))
    return parts


def _any_overlap(parts: list[_Part]) -> bool:
    """Return whether two of `parts` may share an element (boxes of one tensor must not overlap)."""
    if len(parts) < 2:
        return False
    boxes: dict[Box, list[tuple[int, int]]] = defaultdict(list)
    for part in parts:
        run = part.read.stored
        boxes[run.offset, run.shape].append((run.start, run.end))
    for ranges in boxes.values():
        ranges.sort()
        if any(after[0] < before[1] for before, after in itertools.pairwise(ranges)):
            return True
    return any(intersection(*pair) is not None for pair in itertools.combinations(boxes, 2))
