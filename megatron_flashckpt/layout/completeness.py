"""Check that the stored pieces of all ranks form complete tensors: every element exactly once.

`read_plan` checks that one rank's wanted pieces can be filled; this module checks the checkpoint
itself, independent of the layout that loads it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from megatron_flashckpt.errors import LayoutError
from megatron_flashckpt.layout.copies import CopyPlace, copy_kind, split
from megatron_flashckpt.layout.dtypes import DERIVED_TYPES
from megatron_flashckpt.layout.piece import BUFFER, MASTER, RANK_STATE, WEIGHT, Piece, Shape
from megatron_flashckpt.layout.template import Source, pieces_of

#: Kinds whose tensors must be complete. Optimizers keep no state of frozen parameters, so in other
#: kinds a stacked tensor may lack the boxes of some layers.
_WHOLE = (WEIGHT, BUFFER)
#: An outline has 2**axes corners per box; models shard along four axes at most.
_MAX_CUT_AXES = 10

_Name = tuple[str, str, CopyPlace | None]
"""Kind, key, and place of the copy."""
_Box = tuple[Shape, Shape]
"""Offset and shape."""
_Runs = dict[_Box, list[tuple[int, int, int]]]
"""Stored ranges of each box: start, end, rank."""


class _Tensor:
    """The stored pieces of all ranks for one kind, key and copy."""

    def __init__(self) -> None:
        self.shapes: set[Shape] = set()
        self.boxes: _Runs = defaultdict(list)
        self.dtypes: dict[_Box, set[str]] = defaultdict(set)
        """Element types by box. Layers that share a key may differ; one box must not."""

    def add(self, piece: Piece, rank: int) -> None:
        self.shapes.add(piece.global_shape)
        if piece.numel:
            box = piece.offset, piece.shape
            self.dtypes[box].add(piece.dtype)
            self.boxes[box].append((piece.start, piece.end, rank))


class Tally(NamedTuple):
    """Stored and expected numbers of elements of one tensor.

    Both are summed over the ranks; exactly one rank contributes the expected number.
    """

    held: int
    wanted: int

    def plus(self, other: Tally) -> Tally:
        return Tally(self.held + other.held, self.wanted + other.wanted)


def tally(pieces: Iterable[Piece], wanted: Iterable[tuple[str, str, Shape]]) -> dict[str, Tally]:
    """Count one rank's elements of the tensors that must be complete, by `kind/key`.

    Args:
        wanted: kind, key and global shape of the tensors whose expected size this rank contributes.
    """
    counts = [(p.kind, p.key, Tally(p.numel, 0)) for p in pieces if p.kind in _WHOLE]
    counts += [(kind, key, Tally(0, math.prod(shape))) for kind, key, shape in wanted]
    tallies: dict[str, Tally] = {}
    for kind, key, count in counts:
        name = f"{kind}/{key}"
        tallies[name] = tallies.get(name, Tally(0, 0)).plus(count)
    return tallies


def incomplete(sources: Iterable[Source]) -> list[str]:
    """Return one line per tensor that is not stored exactly once; empty if all tensors are.

    The ranges of every box must tile the box, and the boxes of a tensor must tile the tensor, in
    each copy of it. Rank state is exempt from the second rule: every rank has a box of its own
    size.
    """
    tensors: dict[_Name, _Tensor] = defaultdict(_Tensor)
    problems = []
    for source in sources:
        for piece in pieces_of(source.template, source.placement):
            try:
                piece.check()
            except LayoutError as error:
                problems.append(f"rank {source.rank}: {error}")
                continue
            place, main = split(piece)
            tensors[main.kind, main.key, place].add(main, source.rank)
    for kind, key, place in sorted(tensors, key=str):
        tensor = tensors[kind, key, place]
        same_key = [tensors.get((each, key, place), _Tensor()) for each in (WEIGHT, MASTER)]
        problem = _problem(kind, tensor, *same_key)
        if problem is not None:
            name = f"{kind}/{key}"
            if place is not None:
                name = f"{copy_kind(kind)}/{key}: the copy at {place.offset}"
            problems.append(f"{name}: {problem}")
    return problems


def _problem(kind: str, tensor: _Tensor, weight: _Tensor, master: _Tensor) -> str | None:
    """Return the defect of one tensor, or None.

    Args:
        weight: the tensor stored under the same key as weights; master: as masters.
    """
    if kind != RANK_STATE:
        if len(tensor.shapes) > 1:
            listed = ", ".join(map(str, sorted(tensor.shapes)))
            return f"ranks disagree about its global shape: {listed}"
        for box, dtypes in sorted(tensor.dtypes.items()):
            if len(dtypes) > 1:
                listed = ", ".join(sorted(dtypes))
                return f"box at {box[0]} of shape {box[1]}: ranks disagree about its type: {listed}"
        (global_shape,) = tensor.shapes
        boxes = tensor.boxes.keys()
        # Optimizers keep no state of frozen layers; the weight has the boxes of those layers.
        if kind in _WHOLE or not boxes <= weight.boxes.keys():
            problem = _untiled(list(boxes), global_shape)
            model = weight.boxes.keys() | _in_place_of_weights(weight, master)
            excused = kind != BUFFER and boxes != model and boxes <= model
            if problem is not None and not (
                excused and _untiled(list(model), global_shape) is None
            ):
                return problem
    for box, runs in sorted(tensor.boxes.items()):
        problem = _gap_or_overlap(runs, math.prod(box[1]))
        if problem is not None:
            return f"box at {box[0]} of shape {box[1]}: {problem}"
    return None


def _in_place_of_weights(weight: _Tensor, master: _Tensor) -> set[_Box]:
    """Return the boxes of masters from which a load derives weights (`weights: derive`).

    A save that omits 16-bit weights omits all 16-bit weights of a key. Weights of other types, in
    other layers, have no masters.
    """
    if not DERIVED_TYPES.isdisjoint(set().union(*weight.dtypes.values())):
        return set()
    return {box for box, dtypes in master.dtypes.items() if dtypes == {"F32"}}


def _gap_or_overlap(runs: list[tuple[int, int, int]], volume: int) -> str | None:
    position, last = 0, -1
    for start, end, rank in sorted(runs):
        if start > position:
            return f"elements {position}-{start - 1} are missing"
        if start < position:
            return (
                f"elements {start}-{min(end, position) - 1} are stored twice "
                f"(ranks {last} and {rank})"
            )
        position, last = end, rank
    return None if position == volume else f"elements {position}-{volume - 1} are missing"


def _untiled(boxes: list[_Box], global_shape: Shape) -> str | None:
    """Return the reason why `boxes` do not tile the global shape; None if they do.

    Boxes tile a region exactly if their corners, with alternating signs, add up to the corners of
    that region: the mixed difference of an indicator function determines the function. Comparing
    pairs of boxes would be too slow for a mixture of experts on many ranks.
    """
    # Axes that no box shards are equal in all corners.
    cut = [
        axis
        for axis, size in enumerate(global_shape)
        if any((offset[axis], shape[axis]) != (0, size) for offset, shape in boxes)
    ]
    if len(cut) > _MAX_CUT_AXES:
        return f"is sharded along {len(cut)} axes; at most {_MAX_CUT_AXES} are supported"
    volume = math.prod(global_shape)
    outline: Counter[Shape] = Counter()
    _add_corners(outline, (0,) * len(cut), tuple(global_shape[i] for i in cut), -1 if volume else 0)
    for offset, shape in boxes:
        _add_corners(outline, tuple(offset[i] for i in cut), tuple(shape[i] for i in cut), 1)
    if not any(outline.values()):
        return None
    held = sum(math.prod(shape) for _, shape in boxes)
    if held < volume:
        return f"at least {volume - held} of {volume} elements are in no box"
    return f"boxes overlap: they hold {held} elements, the tensor has {volume}"


def _add_corners(outline: Counter[Shape], offset: Shape, shape: Shape, sign: int) -> None:
    ends = (((low, 1), (low + n, -1)) for low, n in zip(offset, shape, strict=True))
    for corner in itertools.product(*ends):
        outline[tuple(place for place, _ in corner)] += sign * math.prod(s for _, s in corner)
