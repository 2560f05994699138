"""A rank's layout: the order of its tensors, equal in host memory and in the file.

A layout is a *template* (names, types, sizes and byte offsets) plus a *placement* (the position of
each tensor in its global tensor). Ranks of one tensor group, and pipeline stages with equal layers,
have equal templates: Megatron stacks layers along a prepended axis, so only the placement
distinguishes layer 3 from layer 7, or tensor rank 3's copy of a norm from tensor rank 7's
(`copies`). One rank computes a template with its part of the file header; the agent shares it.

A cached layout is used only for pieces equal to its own, offsets included. The fingerprint of a
template covers every field of it. Any difference is a cache miss, never an error and never a guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import msgspec
import xxhash

from megatron_flashckpt.errors import UNDECODABLE, LayoutError
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece, Shape
from megatron_flashckpt.layout.save_cost import PlanOrigin


class TemplateItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tensor of the file: its bytes begin at `byte_offset` of the data section."""

    key: str
    kind: str
    dtype: str
    global_shape: Shape
    shape: Shape
    numel: int
    byte_offset: int
    placed_at: int
    """Index of the item's first number in a placement. A weight, its master and its moments share
    these numbers."""

    @property
    def place(self) -> slice:
        """The item's numbers in a placement."""
        return slice(self.placed_at, self.placed_at + len(self.shape) + 1)


class Template(msgspec.Struct, frozen=True, array_like=True):
    """The tensors of a file with their byte offsets, and the file header derived from them."""

    items: tuple[TemplateItem, ...]
    nbytes: int
    header_entries: bytes
    """The safetensors header as a JSON object, without `__metadata__`."""


Placement = tuple[int, ...]
"""Position of a template's items in their global tensors: the offset of the box (one number per
axis), then the start of the range. Items at equal positions share their numbers. The tuple is flat
because a large job has millions of positions."""


#: Bytes of a CPU cache line; no vector instruction needs more.
_WELL_ALIGNED = 64


class _Placed(Protocol):
    @property
    def shape(self) -> Shape: ...

    @property
    def placed_at(self) -> int: ...


class Layout(msgspec.Struct, frozen=True):
    """The ordered pieces of one rank with their byte offsets."""

    template: Template
    placement: Placement
    template_fingerprint: str
    encoded_template: bytes
    """The template as every save sends it to the agent."""

    @property
    def nbytes(self) -> int:
        return self.template.nbytes


class Source(NamedTuple):
    """Layout that one rank stored."""

    rank: int
    template: Template
    placement: Placement


def stored_items(sources: Iterable[Source]) -> Iterable[TemplateItem]:
    """Yield the items of every distinct template once; ranks share templates."""
    templates = {id(source.template): source.template for source in sources}
    for template in templates.values():
        yield from template.items


def order(pieces: list[Piece]) -> list[int]:
    """Return the positions of `pieces` in layout order, which aligns tensors without padding.

    Pieces are sorted by the largest power of two that divides their size in bytes (at most
    `_WELL_ALIGNED`), then by element size, both descending; the sort is stable. Every tensor is
    then aligned to its element, and the large tensors of usual models to a cache line. safetensors
    forbids padding. A copy to an address 16 bytes past a multiple of 32 took 1.9 times as long, 8
    bytes past it 3.4 times.
    """

    def rank(piece: Piece) -> int:
        width = itemsize(piece.dtype)
        nbytes = (piece.end - piece.start) * width
        return (min(nbytes & -nbytes, _WELL_ALIGNED) or _WELL_ALIGNED) * 256 + width

    return sorted(range(len(pieces)), key=[rank(p) for p in pieces].__getitem__, reverse=True)


def pieces_of(template: Template, placement: Placement) -> list[Piece]:
    """Return the pieces that a template and a placement describe, in layout order."""
    if len(placement) != placement_length(template.items):
        raise LayoutError(
            f"the placement has {len(placement)} numbers, its template needs "
            f"{placement_length(template.items)}"
        )
    return [piece_of(item, placement) for item in template.items]


def piece_of(item: TemplateItem, placement: Placement) -> Piece:
    """Return the piece that `item` describes at its position in `placement`."""
    *offset, start = placement[item.place]
    return Piece(
        item.key,
        item.kind,
        item.dtype,
        item.global_shape,
        tuple(offset),
        item.shape,
        start,
        start + item.numel,
    )


def placed(pieces: Iterable[Piece]) -> tuple[list[int], Placement]:
    """Return the index of each piece's first number in the placement, and the placement.

    Pieces of one key at equal positions of equally shaped tensors share their numbers: a weight,
    its master and Adam's two moments need one entry.
    """
    positions: dict[object, int] = {}
    numbers: list[int] = []
    placed_at = []
    for piece in pieces:
        part = (piece.key, piece.global_shape, piece.shape, piece.numel, piece.offset, piece.start)
        position = positions.setdefault(part, len(numbers))
        if position == len(numbers):
            numbers += (*piece.offset, piece.start)
        placed_at.append(position)
    return placed_at, tuple(numbers)


def placement_length(items: Iterable[_Placed]) -> int:
    """Return the length of a placement for a template's `items`."""
    return max((item.placed_at + len(item.shape) + 1 for item in items), default=0)


def tensor_names(items: list[tuple[str, str]]) -> list[str]:
    """Return file-unique tensor names for `(kind, key)` pairs.

    Layers of one stage share a key, so names carry the number of the occurrence:
    `weight/decoder.x#1`. Names omit the placement, so that equal stages can share a template.
    """
    seen: dict[tuple[str, str], int] = {}
    names = []
    for pair in items:
        nth = seen.get(pair, 0)
        seen[pair] = nth + 1
        names.append(f"{pair[0]}/{pair[1]}#{nth}")
    return names


def build_template(pieces: list[Piece], placed_at: list[int]) -> Template:
    """Return the template of `pieces` (in layout order); `placed_at` comes from `placed`."""
    items = []
    entries = {}
    position = 0
    names = tensor_names([(piece.kind, piece.key) for piece in pieces])
    for name, piece, number in zip(names, pieces, placed_at, strict=True):
        piece.check()
        items.append(
            TemplateItem(
                piece.key,
                piece.kind,
                piece.dtype,
                piece.global_shape,
                piece.shape,
                piece.numel,
                position,
                number,
            )
        )
        entries[name] = {
            "dtype": piece.dtype,
            "shape": [piece.numel],
            "data_offsets": [position, position + piece.nbytes],
        }
        position += piece.nbytes
    return Template(tuple(items), position, msgspec.json.encode(entries))


#: Layouts kept per rank. A job has one; state that depends on the batch size adds a few.
_KEPT_LAYOUTS = 8


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(value))


_TEMPLATE = msgspec.msgpack.Decoder(Template)


class PlanCache:
    """Cache of one rank's latest layouts, backed by the agent's templates; not thread-safe.

    `fetch` and `publish` access the agent's template store; `None` if there is no agent.
    """

    def __init__(
        self,
        fetch: Callable[[str], bytes | None] | None = None,
        publish: Callable[[str, bytes], None] | None = None,
    ) -> None:
        self.origins: Counter[PlanOrigin] = Counter()
        """Number of the returned layouts of each origin."""
        self._taken: Counter[PlanOrigin] = Counter()
        self._kept: list[tuple[list[Piece], Layout]] = []
        self._fetch = fetch
        self._publish = publish

    def take_origin(self) -> PlanOrigin:
        """Return the most expensive origin of the layouts returned since the last call."""
        later = self.origins - self._taken
        self._taken = self.origins.copy()
        return "computed" if later["computed"] else "found" if later["found"] else "kept"

    def layout(self, pieces: list[Piece]) -> Layout:
        """Return the layout of `pieces`, which must be in layout order (see `order`)."""
        # Usually the pieces are the same objects (`Geometry.parts`), which compare by identity.
        for known, cached in self._kept:
            if known == pieces:
                self.origins["kept"] += 1
                return cached
        placed_at, placement = placed(pieces)
        template_part = [
            (p.key, p.kind, p.dtype, p.global_shape, p.shape, p.numel, position)
            for p, position in zip(pieces, placed_at, strict=True)
        ]
        template_fingerprint = _digest(template_part)
        shared = self._shared(template_fingerprint)
        if shared is not None:
            self.origins["found"] += 1
            template, encoded = shared
        else:
            self.origins["computed"] += 1
            template = build_template(pieces, placed_at)
            encoded = msgspec.msgpack.encode(template)
            if self._publish is not None:
                self._publish(template_fingerprint, encoded)
        layout = Layout(template, placement, template_fingerprint, encoded)
        self._kept = [(list(pieces), layout), *self._kept[: _KEPT_LAYOUTS - 1]]
        return layout

    def _shared(self, fingerprint: str) -> tuple[Template, bytes] | None:
        encoded = self._fetch(fingerprint) if self._fetch is not None else None
        if encoded is None:
            return None
        try:
            return _TEMPLATE.decode(encoded), encoded
        except UNDECODABLE:  # left there by another release: a miss, not an error
            return None
