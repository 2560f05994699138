"""The ranks that saved a checkpoint: their coordinates, and the pieces that each rank stored."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

import torch

from megatron_flashckpt.errors import LayoutError
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.copies import AXES, CopyPlace, is_copy, place_of
from megatron_flashckpt.layout.dtypes import DERIVED_TYPES
from megatron_flashckpt.layout.exact_match import (
    NOTHING_STORED,
    StoredPieces,
    Tensors,
    pieces_stored_once,
    stored_tensors,
)
from megatron_flashckpt.layout.piece import BUFFER, MASTER, RANK_STATE, WEIGHT, Piece, Shape
from megatron_flashckpt.layout.read_plan import stored_types
from megatron_flashckpt.layout.stored_index import (
    ANYWHERE,
    LIMIT,
    Columns,
    Name,
    Rows,
    Variant,
    outside_error,
    stored_columns,
)
from megatron_flashckpt.layout.template import Placement, Source, TemplateItem, piece_of
from megatron_flashckpt.megatron_lm.torch_dtypes import torch_dtype


@dataclasses.dataclass(frozen=True)
class SavedJob:
    """The facts about the saving ranks, in memory or storage, that the plan of a load needs."""

    place: str
    """Name of the checkpoint in messages."""
    sources: list[Source]
    coordinates: list[Coordinates]

    @property
    def model_sizes(self) -> tuple[int, int, int]:
        """The tensor, pipeline and expert parallel sizes of the saving job."""
        ranks = self.coordinates
        return (
            max(rank.tp for rank in ranks) + 1,
            max(rank.pp for rank in ranks) + 1,
            max(rank.ep for rank in ranks) + 1,
        )

    def matching_rank(self, own: Coordinates, model_sizes: tuple[int, int, int]) -> int | None:
        """Return the saving rank at coordinates `own`, whose random state the loading rank takes.

        If the number of replicas has changed, there may be no such rank. Then return the first rank
        with the same part of the model, because Megatron takes the state of the first replica.
        Return None if the tensor or pipeline parallel size has changed, because random states have
        no meaning then.
        """
        if model_sizes[:2] != self.model_sizes[:2]:
            return None
        for part in (
            lambda place: place,
            lambda place: (place.tp, place.pp, place.ep),
            lambda place: (place.tp, place.pp),
        ):
            for rank, place in enumerate(self.coordinates):
                if part(place) == part(own):
                    return rank
        return None

    def is_same(self, now: list[Coordinates], model_sizes: tuple[int, int, int]) -> bool:
        """Return whether every rank has the same coordinates as when it saved."""
        return now == self.coordinates and model_sizes == self.model_sizes

    def representatives(self) -> list[int]:
        """Return one rank per pipeline stage and expert rank; together these know all groups."""
        first: dict[tuple[int, int], int] = {}
        for rank, place in enumerate(self.coordinates):
            first.setdefault((place.pp, place.ep), rank)
        return list(first.values())

    @functools.cached_property
    def tensors(self) -> Tensors:
        """Number of stored elements of every tensor over all ranks, side states included."""
        return stored_tensors(self.sources)

    @functools.cached_property
    def types(self) -> dict[Name, set[str]]:
        """Element types of all stored tensors by kind and key; layers of a key may differ."""
        types: dict[Name, set[str]] = {}
        for kind, key, dtype, _ in self.tensors:
            types.setdefault((kind, key), set()).add(dtype)
        return types

    @functools.cached_property
    def _mixed(self) -> dict[Name, dict[Variant, Rows | Columns]]:
        """Runs of the tensors whose layers differ in type."""
        mixed = [name for name, types in self.types.items() if len(types) > 1]
        hulls = dict.fromkeys(mixed, ANYWHERE)
        return stored_columns(self.sources, hulls, self.place) if mixed else {}

    def type_of(self, kind: str, piece: Piece) -> str | None:
        """Return the type in which the elements of `piece`, of any kind, are stored as `kind`.

        None: they are not stored.
        """
        name = kind, piece.key
        types: Collection[str] = self.types.get(name, ())
        if len(types) > 1:
            types = stored_types(piece, self._mixed[name])
        return min(types, default=None)

    @functools.cached_property
    def derived_keys(self) -> set[str]:
        """Keys whose 16-bit weights were saved as masters only (`weights: derive`).

        Layers of other types that share the key have no masters and are stored as weights.
        """
        numels: Counter[str] = Counter()
        shapes: dict[str, Shape] = {}
        for (kind, key, dtype, shape), numel in self.tensors.items():
            if kind == WEIGHT or (kind, dtype) == (MASTER, "F32"):
                numels[key] += numel
                shapes[key] = shape
        # Offloading optimizers also keep masters of fp32 weights; both are stored.
        return {
            key
            for (kind, key), types in self.types.items()
            if (kind == MASTER and "F32" in types)
            and DERIVED_TYPES.isdisjoint(self.types.get((WEIGHT, key), ()))
            and numels[key] <= math.prod(shapes[key])
        }

    @property
    def optimizer_kinds(self) -> set[str]:
        """Kinds of the stored optimizer tensors, including masters."""
        kinds = {kind for kind, *_ in self.tensors if not is_copy(kind)}
        return kinds - {WEIGHT, BUFFER, RANK_STATE} | {MASTER}

    @functools.cached_property
    def state_types(self) -> dict[str, dict[str, torch.dtype]]:
        """Type of each kind of optimizer state, by key; any one of the types if layers differ."""
        kinds = self.optimizer_kinds - {MASTER}
        by_key: dict[str, dict[str, torch.dtype]] = defaultdict(dict)
        for (kind, key), types in self.types.items():
            if kind in kinds:
                by_key[key][kind] = torch_dtype(min(types))
        return by_key

    def state_type(self, kind: str, pieces: Iterable[Piece]) -> torch.dtype | None:
        """Return the stored type of one kind of state of a parameter's `pieces`; None: no state."""
        types = (self.type_of(kind, piece) for piece in pieces)
        return next((torch_dtype(name) for name in types if name is not None), None)

    def types_by_kind(self) -> dict[str, set[torch.dtype]]:
        """Return the types of each kind of stored tensors."""
        by_kind: dict[str, set[torch.dtype]] = defaultdict(set)
        for kind, _, dtype, _ in self.tensors:
            by_kind[kind].add(torch_dtype(dtype))
        return by_kind

    @functools.cached_property
    def copies(self) -> dict[tuple[str, Shape], CopyPlace]:
        """Places of all copies stored in addition to the main ones, by key and offset."""
        placements: dict[int, list[Placement]] = defaultdict(list)
        for source in self.sources:
            placements[id(source.template)].append(source.placement)
        places: dict[tuple[str, Shape], CopyPlace] = {}
        for template in {id(source.template): source.template for source in self.sources}.values():
            # A weight, its master and its moments are at one position.
            copies = {item.placed_at: item for item in template.items if is_copy(item.kind)}
            numbers = [slice(position, position + AXES) for position in copies]
            # Thousands of ranks share a template, and only a few places. (The second slice makes
            # the getter return a tuple for a single copy.)
            offsets_of = operator.itemgetter(*numbers, slice(0))
            for offsets in set(map(offsets_of, placements[id(template)])):
                for item, offset in zip(copies.values(), offsets, strict=False):
                    places[item.key, offset] = place_of(item.global_shape, offset)
        return places

    def pieces_of_rank(self, rank: int | None) -> StoredPieces:
        """Return the pieces that only `rank` stores; empty if `rank` is None."""
        return (
            NOTHING_STORED if rank is None else pieces_stored_once(self.sources[rank], self.tensors)
        )

    def rank_state(self, rank: int) -> tuple[Piece, int] | None:
        """Return the piece with the side state of `rank`, and its byte offset in the rank's data.

        Raises:
            CorruptCheckpointError: the piece lies outside of its own box, tensor or file.
        """
        source = self.sources[rank]
        item = self._rank_states.get(id(source.template))
        if item is None:
            return None
        piece = piece_of(item, source.placement)
        try:
            piece.check()
        except LayoutError as error:
            raise outside_error(item, rank, self.place) from error
        if not 0 <= item.byte_offset < LIMIT:
            raise outside_error(item, rank, self.place)
        return piece, item.byte_offset

    @property
    def has_all_side_state(self) -> bool:
        """True if every rank stored a side state."""
        return None not in self._rank_states.values()

    @functools.cached_property
    def _rank_states(self) -> dict[int, TemplateItem | None]:
        """Item of the side state by template id; many ranks share one template."""
        templates = {id(source.template): source.template for source in self.sources}
        return {
            template_id: next((item for item in template.items if item.kind == RANK_STATE), None)
            for template_id, template in templates.items()
        }
