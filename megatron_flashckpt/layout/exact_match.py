"""What is known of stored pieces before anyone looks where each lies: how much of each tensor there
is, and which pieces one rank has to itself.

In the layout that was saved nearly all that a rank wants is what the rank in its place has stored.
A look-up for each piece finds these; only for the rest all shards are searched (`coverage`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from megatron_flashckpt.layout.piece import Piece, Shape
from megatron_flashckpt.layout.reshard import Run
from megatron_flashckpt.layout.stored_index import LIMIT
from megatron_flashckpt.layout.template import Source, TemplateItem, piece_of, placement_length

# No named tuple: to make one of these for each of 20,000 items takes twice the time.
Tensors = Mapping[tuple[str, str, str, Shape], int]
"""By kind, key, type and global shape, how many elements all ranks have stored, together."""


class Held(NamedTuple):
    """Pieces of one rank, by where they begin in its data section."""

    rank: int
    pieces: Mapping[Piece, int]


NOTHING_HELD = Held(-1, {})


def stored_tensors(sources: Iterable[Source]) -> Tensors:
    """Return what there is of each tensor. A template is looked at once, however many share it."""
    sources = list(sources)
    users = Counter(id(source.template) for source in sources)
    found: dict[tuple[str, str, str, Shape], int] = {}
    for number, template in {id(source.template): source.template for source in sources}.items():
        for item in template.items:
            tensor = item.kind, item.key, item.dtype, item.global_shape
            found[tensor] = found.get(tensor, 0) + users[number] * item.numel
    return found


def typed_runs(
    sources: Iterable[Source], names: Collection[tuple[str, str]]
) -> dict[tuple[str, str], list[tuple[Run, str]]]:
    """Return the stored runs of the tensors `names` (kind and key), each with its type."""
    items: dict[int, tuple[int, list[TemplateItem]]] = {}
    found: dict[tuple[str, str], list[tuple[Run, str]]] = {name: [] for name in names}
    for source in sources:
        template = source.template
        if id(template) not in items:
            named = [it for it in template.items if (it.kind, it.key) in names]
            items[id(template)] = placement_length(template.items), named
        length, of_template = items[id(template)]
        if len(source.placement) != length:  # whoever plans reads says what is wrong
            continue
        for item in of_template:
            run = Run.of(piece_of(item, source.placement))
            found[item.kind, item.key].append((run, item.dtype))
    return found


def held_once(source: Source, tensors: Tensors) -> Held:
    """Return the pieces of `source`, without those of tensors of which more is there than can be.

    Whoever wants a piece that equals one of these in every field may read it as it stands here:

    - It does not lie outside of its box or tensor, because what is wanted does not.
    - Of a tensor of which no more is stored than there can be, elements that are there twice mean
      that others are missing. If any rank wants those, the load fails on all ranks. If none does
      (of frozen parameters an optimizer has nothing), a rank gets back what it has stored itself,
      and one that has not stored it finds it twice, and refuses.

    Args:
        tensors: what all ranks have stored.
    """
    template, placement = source.template, source.placement
    if len(placement) != placement_length(template.items):  # whoever searches it says what is wrong
        return NOTHING_HELD
    doubtful = _doubtful(tensors)
    pieces: dict[Piece, int] = {}
    for item in template.items:
        if (item.kind, item.key) in doubtful or not 0 <= item.byte_offset < LIMIT:
            continue
        # `piece_of`, which would take twice the time.
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
            return NOTHING_HELD  # which of the two is meant?
    return Held(source.rank, pieces)


def _doubtful(tensors: Tensors) -> set[tuple[str, str]]:
    """Return kind and key of tensors of several shapes, or of which there is too much.

    Layers that share a key may differ in type, so elements of all types count together.
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
