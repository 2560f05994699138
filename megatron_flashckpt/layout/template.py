"""A rank's layout: the same bytes in memory and in the file.

A layout is a *template* (what lies where) plus a *placement* (which part of the global tensors it
is). Ranks of one tensor group and like pipeline stages have equal templates, because Megatron
stacks layers along a prepended axis: only the placement tells layer 3 from layer 7. So a template,
with the part of the file header that belongs to it, is computed once and shared through the agent.

A cached layout is used only for pieces that are equal to its own, offsets included. The fingerprint
of a template covers everything that it stands for. Anything else is a miss, never an error and
never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import msgspec
import xxhash

from megatron_flashckpt.errors import LayoutError
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece, Shape
from megatron_flashckpt.layout.save_cost import PlanOrigin


class TemplateItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of the file: `nbytes` bytes at `byte_offset` of the data section."""

    key: str
    kind: str
    dtype: str
    global_shape: Shape
    shape: Shape
    numel: int
    byte_offset: int
    placed_at: int
    """Where in a placement its numbers begin. A weight's master and moments have the same ones."""

    @property
    def place(self) -> slice:
        """Which numbers of a placement are its own."""
        return slice(self.placed_at, self.placed_at + len(self.shape) + 1)


class Template(msgspec.Struct, frozen=True, array_like=True):
    """What lies where, and the encoded part of the file header that follows from it."""

    items: tuple[TemplateItem, ...]
    nbytes: int
    header_entries: bytes
    """JSON object of the safetensors header without `__metadata__`."""


Placement = tuple[int, ...]
"""Which part of the global tensors a template's items are: for each that is placed like none before
it, its box's offset (one number per axis), then its range's start. Flat, because a large job has
millions of them."""


#: A line of the processor's cache, and more than any vector instruction takes.
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
    """As every save hands it on."""

    @property
    def nbytes(self) -> int:
        return self.template.nbytes


class Source(NamedTuple):
    """One rank's stored layout."""

    rank: int
    template: Template
    placement: Placement


def stored_items(sources: Iterable[Source]) -> Iterable[TemplateItem]:
    """Yield the items of every template once; ranks share templates."""
    templates = {id(source.template): source.template for source in sources}
    for template in templates.values():
        yield from template.items


def order(pieces: list[Piece]) -> list[int]:
    """Return the positions of `pieces` in layout order: those that keep what follows aligned first.

    By the largest power of two that divides their bytes, at most `_WELL_ALIGNED`, and by element
    size within that; otherwise the caller's order stays. So every tensor is aligned to its element,
    and nearly all, and all large ones of usual models, to what copies are fast at, without padding,
    which safetensors forbids. A kernel that copied to an address that was 16 bytes off, beyond
    multiples of 32, took 1.9 times as long; 8 bytes off, 3.4 times.
    """

    def rank(piece: Piece) -> int:
        width = itemsize(piece.dtype)
        nbytes = (piece.end - piece.start) * width
        return (min(nbytes & -nbytes, _WELL_ALIGNED) or _WELL_ALIGNED) * 256 + width

    return sorted(range(len(pieces)), key=[rank(it) for it in pieces].__getitem__, reverse=True)


def pieces_of(template: Template, placement: Placement) -> list[Piece]:
    """Return the pieces that a template and a placement describe, in layout order."""
    if len(placement) != placement_length(template.items):
        raise LayoutError(
            f"a placement of {len(placement)} numbers for a template that takes "
            f"{placement_length(template.items)}"
        )
    return [piece_of(item, placement) for item in template.items]


def piece_of(item: TemplateItem, placement: Placement) -> Piece:
    """Return the piece that an item of a template is with such a placement."""
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
    """Return where each piece's numbers begin in the placement of `pieces`, and the placement.

    Pieces of one key that are the same part of equal tensors have them in common: of Adam's four
    kinds three say nothing new.
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
    """Return how many numbers the placement of a template's `items` has."""
    return max((item.placed_at + len(item.shape) + 1 for item in items), default=0)


def tensor_names(items: list[tuple[str, str]]) -> list[str]:
    """Return file-unique tensor names for `(kind, key)` pairs.

    Layers of one stage share a key, so the n-th occurrence is numbered: `weight/decoder.x#1`.
    Names say nothing of the placement, or like stages could not share a template.
    """
    seen: dict[tuple[str, str], int] = {}
    names = []
    for pair in items:
        nth = seen.get(pair, 0)
        seen[pair] = nth + 1
        names.append(f"{pair[0]}/{pair[1]}#{nth}")
    return names


def build_template(pieces: list[Piece], placed_at: list[int]) -> Template:
    """Return the template of `pieces`, which must be in layout order, with what `placed` said."""
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


#: Layouts kept per rank: a job has one, a few more while batch-size-dependent state changes.
_KEPT_LAYOUTS = 8


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(value))


class PlanCounters(msgspec.Struct):
    """How often a layout was found in this process, at the agent, or computed."""

    local_hits: int = 0
    shared_hits: int = 0
    misses: int = 0


_TEMPLATE = msgspec.msgpack.Decoder(Template)


class PlanCache:
    """The latest layouts; templates also through the agent.

    Used by one rank; not thread-safe. `fetch` and `publish` reach the agent's template store and
    may be `None` when there is none.
    """

    def __init__(
        self,
        fetch: Callable[[str], bytes | None] | None = None,
        publish: Callable[[str, bytes], None] | None = None,
    ) -> None:
        self.counters = PlanCounters()
        self._origin: PlanOrigin = "kept"
        self._kept: list[tuple[list[Piece], Layout]] = []
        self._ordered: tuple[list[Piece], list[int]] = ([], [])
        self._fetch = fetch
        self._publish = publish

    def take_origin(self) -> PlanOrigin:
        """Return how layouts came about since the last call: by the most expensive way taken."""
        origin, self._origin = self._origin, "kept"
        return origin

    def order(self, pieces: list[Piece]) -> list[int]:
        """Return `order(pieces)`, at once if they are those of the last call."""
        if self._ordered[0] != pieces:
            self._ordered = (list(pieces), order(pieces))
        return self._ordered[1]

    def layout(self, pieces: list[Piece]) -> Layout:
        """Return the layout of `pieces`, which must be in layout order (see `order`)."""
        # Nearly always the same objects (`Geometry.parts`), which takes no look into them.
        for known, cached in self._kept:
            if known == pieces:
                self.counters.local_hits += 1
                return cached
        placed_at, placement = placed(pieces)
        template_part = [
            (p.key, p.kind, p.dtype, p.global_shape, p.shape, p.numel, position)
            for p, position in zip(pieces, placed_at, strict=True)
        ]
        template_fingerprint = _digest(template_part)
        shared = self._shared(template_fingerprint)
        if shared is not None:
            self.counters.shared_hits += 1
            if self._origin == "kept":
                self._origin = "found"
            template, encoded = shared
        else:
            self.counters.misses += 1
            self._origin = "computed"
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
        except msgspec.DecodeError:  # left there by another release: a miss, not an error
            return None
