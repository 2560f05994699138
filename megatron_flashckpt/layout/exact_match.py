"""Fast path of a load: wanted pieces that one stored rank holds exactly.

Under the layout that was saved, nearly all wanted pieces of a rank equal the pieces that the rank
at the same coordinates stored. A dictionary finds these; only the others are searched in all shards
(`read_plan`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatron_flashckpt.layout.piece import Piece, Shape
from megatron_flashckpt.layout.stored_index import LIMIT
from megatron_flashckpt.layout.template import Source, placement_length

# Plain tuples as keys: named tuples double the time for 20,000 items.
Tensors = Mapping[tuple[str, str, str, Shape], int]
"""Number of elements stored by all ranks together, by kind, key, type and global shape."""


class StoredPieces(NamedTuple):
    """The pieces that one rank stored, with their byte offsets in its data section."""

    rank: int
    pieces: Mapping[Piece, int]


NOTHING_STORED = StoredPieces(-1, {})


def stored_tensors(sources: Iterable[Source]) -> Tensors:
    """Return the number of stored elements of each tensor. Shared templates are visited once."""
    sources = list(sources)
    users = Counter(id(source.template) for source in sources)
    numels: dict[tuple[str, str, str, Shape], int] = {}
    for number, template in {id(source.template): source.template for source in sources}.items():
        for item in template.items:
            tensor = item.kind, item.key, item.dtype, item.global_shape
            numels[tensor] = numels.get(tensor, 0) + users[number] * item.numel
    return numels


def pieces_stored_once(source: Source, tensors: Tensors) -> StoredPieces:
    """Return the pieces of `source`, except those of tensors with more elements than their shape.

    A wanted piece that equals a returned piece in every field can be read from it unchecked:

    - The piece lies within its box and tensor, because the wanted piece does.
    - If a tensor has at most as many stored elements as its shape, a duplicate element implies a
      missing element. If any rank wants the missing element, the load fails on all ranks. If no
      rank wants it (a frozen parameter), the rank that stored the duplicate reads its own bytes,
      and any other rank finds the duplicate and refuses.

    Args:
        tensors: the numbers of elements that all ranks stored (`stored_tensors`).
    """
    template, placement = source.template, source.placement
    if len(placement) != placement_length(template.items):  # `read_plan` reports this defect
        return NOTHING_STORED
    doubtful = _inconsistent_tensors(tensors)
    pieces: dict[Piece, int] = {}
    for item in template.items:
        if (item.kind, item.key) in doubtful or not 0 <= item.byte_offset < LIMIT:
            continue
        # Inlined `piece_of`: the call would double the time.
        shape, begin = item.shape, item.placed_at
        end = begin + len(shape)
        offset, start = placement[begin:end], placement[end]
        piece = Piece(
            item.key,
            item.kind,
            item.dtype,
            item.global_shape,
            offset,
            shape,
            start,
            start + item.numel,
        )
        if pieces.setdefault(piece, item.byte_offset) != item.byte_offset:
            return NOTHING_STORED  # the piece is stored twice, so the choice is ambiguous
    return StoredPieces(source.rank, pieces)


def _inconsistent_tensors(tensors: Tensors) -> set[tuple[str, str]]:
    """Return kind and key of tensors with several shapes or with too many stored elements.

    Layers that share a key may differ in type, so elements of all types are counted together.
    """
    shapes: dict[tuple[str, str], Shape] = {}
    numels: Counter[tuple[str, str]] = Counter()
    doubtful: set[tuple[str, str]] = set()
    for (kind, key, _, shape), numel in tensors.items():
        name = kind, key
        numels[name] += numel
        if shapes.setdefault(name, shape) != shape or not numels[name] <= math.prod(shape) < LIMIT:
            doubtful.add(name)
    return doubtful
