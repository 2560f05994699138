"""The ranks that saved a checkpoint, wherever it is, and where they stand."""

from __future__ import annotations

import dataclasses
import functools

from megatron_flashckpt.errors import LayoutError
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.copies import split_kind
from megatron_flashckpt.layout.exact_match import (
    NOTHING_HELD,
    Held,
    Tensors,
    held_once,
    stored_tensors,
)
from megatron_flashckpt.layout.piece import RANK_STATE, Piece
from megatron_flashckpt.layout.stored_index import LIMIT, outside_error
from megatron_flashckpt.layout.template import Source, TemplateItem, piece_of


@dataclasses.dataclass(frozen=True)
class SavedJob:
    """The ranks that saved a checkpoint, wherever it is, as far as planning needs to know."""

    place: str
    sources: list[Source]
    coordinates: list[Coordinates]
    differing: frozenset[str] = frozenset()
    """Keys of tensors of which these ranks had copies that differ."""

    @property
    def model_cut(self) -> tuple[int, int, int]:
        """The tensor, pipeline and expert parallel sizes of the saving job."""
        places = self.coordinates
        return (
            max(place.tp for place in places) + 1,
            max(place.pp for place in places) + 1,
            max(place.ep for place in places) + 1,
        )

    def twin(self, mine: Coordinates, model_cut: tuple[int, int, int]) -> int | None:
        """Return the rank whose random state this one takes: the one that stood where it stands.

        If the number of replicas has changed there may be none; then the first one with the same
        part of the model, as Megatron takes it from the first replica. None: the tensor or pipeline
        parallel size has changed, and then random states mean nothing.
        """
        if model_cut[:2] != self.model_cut[:2]:
            return None
        for part in (
            lambda place: place,
            lambda place: (place.tp, place.pp, place.ep),
            lambda place: (place.tp, place.pp),
        ):
            for rank, place in enumerate(self.coordinates):
                if part(place) == part(mine):
                    return rank
        return None

    def is_same(self, now: list[Coordinates], model_cut: tuple[int, int, int]) -> bool:
        """Return whether every rank stands where the rank of its number stood."""
        return now == self.coordinates and model_cut == self.model_cut

    def representatives(self) -> list[int]:
        """Return one rank per pipeline stage and expert rank: together they know all groups."""
        first: dict[tuple[int, int], int] = {}
        for rank, place in enumerate(self.coordinates):
            first.setdefault((place.pp, place.ep), rank)
        return list(first.values())

    @functools.cached_property
    def tensors(self) -> Tensors:
        """How much of which tensors all ranks have stored, side states among them."""
        return stored_tensors(self.sources)

    @functools.cached_property
    def copies(self) -> frozenset[tuple[str, str]]:
        """Key and copy (`Geometry.copy`) of all copies that are stored beside the main ones.

        Without those that are there in part: nodes may have learned at different saves that the
        copies of a tensor differ.
        """
        stored: dict[str, dict[str, dict[str, int]]] = {}
        for (kind, key, *_), numel in self.tensors.items():
            kind, copy = split_kind(kind)
            kinds = stored.setdefault(key, {}).setdefault(copy, {})
            kinds[kind] = kinds.get(kind, 0) + numel
        return frozenset(
            (key, copy)
            for key, copies in stored.items()
            for copy, kinds in copies.items()
            if copy and kinds == copies.get("")
        )

    def held_by(self, rank: int | None) -> Held:
        """Return what `rank` has to itself of the tensors; nothing of no rank."""
        return NOTHING_HELD if rank is None else held_once(self.sources[rank], self.tensors)

    def rank_state(self, rank: int) -> tuple[Piece, int] | None:
        """Return the piece that holds the side state of `rank`, and where it begins in its data.

        Raises:
            CorruptCheckpointError: it lies outside of its own box, tensor or file.
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
        """Whether every rank has left a side state."""
        return None not in self._rank_states.values()

    @functools.cached_property
    def _rank_states(self) -> dict[int, TemplateItem | None]:
        """By template, of which ranks share a few, the item that holds the side state."""
        templates = {id(source.template): source.template for source in self.sources}
        return {
            number: next((it for it in template.items if it.kind == RANK_STATE), None)
            for number, template in templates.items()
        }
