"""What a load reads on this rank: all ranks together check that it is all there, then plan."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch

from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.layout.coverage import ReadPlan, missing_state, read_plan, superfluous
from megatron_flashckpt.layout.manifest import Coordinates
from megatron_flashckpt.layout.piece import BUFFER, MASTER, RANK_STATE, WEIGHT, Piece
from megatron_flashckpt.layout.plan import Source, pieces_of, stored_items
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.dtypes import torch_dtype
from megatron_flashckpt.megatron_lm.model_state import LocalPiece, ModelState
from megatron_flashckpt.restore.collectives import gather_objects, together
from megatron_flashckpt.restore.targets import Targets

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """What a load fills, and how strict it is. Equal on all ranks but for the model."""

    chunks: list[Any]
    optimizer: Any
    """None: weights only."""
    strict: bool
    fill: bool = True
    """False: only the side state is wanted."""


@dataclasses.dataclass(frozen=True)
class SavedJob:
    """The ranks that saved a checkpoint, wherever it is, as far as planning needs to know."""

    place: str
    sources: list[Source]
    coordinates: list[Coordinates]

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

    def representatives(self) -> list[int]:
        """Return one rank per pipeline stage and expert rank: together they know all groups."""
        first: dict[tuple[int, int], int] = {}
        for rank, place in enumerate(self.coordinates):
            first.setdefault((place.pp, place.ep), rank)
        return list(first.values())


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """The reads of this rank, and where they go."""

    reads: ReadPlan
    pieces: list[Piece]
    targets: Targets
    twin: int | None
    model_cut_changed: bool
    rank_states: dict[int, torch.Tensor]
    """By source rank."""

    def zero_padding(self) -> None:
        for index in self.reads.padded:
            self.targets.zero(index)


def plan_load(request: LoadRequest, state: ModelState, found: SavedJob, rank: int) -> LoadPlan:
    """Return the reads of this rank, coverage checked. Collective.

    Raises:
        MissingStateError: on every rank; lists all differences, nothing was overwritten.
    """
    wanted, unwanted = _wanted(request, state, found, rank)
    cut = parallel.model_cut()
    twin = found.twin(parallel.coordinates(), cut)
    changed = cut != found.model_cut
    needed = set() if twin is None else {twin}
    if changed and rank == 0:
        needed |= set(found.representatives())
    rank_states = {source: piece for source in needed if (piece := _rank_state(found, source))}
    framed = {source: _bytes_for(piece) for source, piece in rank_states.items()}
    pieces = [local.piece for local in wanted] + list(rank_states.values())
    tensors = [local.tensor for local in wanted] + list(framed.values())
    resizable = {n for n, local in enumerate(wanted) if local.resizable}
    reads = _reads(
        lambda: read_plan(pieces, found.sources, found.place, unwanted, resizable), found.place
    )
    return LoadPlan(reads, pieces, Targets(pieces, tensors), twin, changed, framed)


def _wanted(
    request: LoadRequest, state: ModelState, found: SavedJob, rank: int
) -> tuple[list[LocalPiece], set[str]]:
    """Return what this rank wants, and the names of what no rank wants. Collective.

    Without `strict`, what is not in the checkpoint is left as it is, what is not in the model is
    not read, and rank 0 says so.
    """
    if not request.fill:
        return [], set()
    optimizer_kinds = {
        item.kind: torch_dtype(item.dtype)
        for item in stored_items(found.sources)
        if item.kind not in (WEIGHT, MASTER, BUFFER, RANK_STATE)
    }
    wanted = together(lambda: state.wanted(request.chunks, request.optimizer, optimizer_kinds))
    kinds = {WEIGHT, BUFFER}
    if request.optimizer is not None:
        kinds |= {MASTER, *optimizer_kinds}
    unwanted = set.intersection(
        *gather_objects(superfluous([local.piece for local in wanted], found.sources, kinds))
    )
    if request.strict:
        return wanted, unwanted
    known = {(item.kind, item.key) for item in stored_items(found.sources)}
    kept = [local for local in wanted if (local.piece.kind, local.piece.key) in known]
    mine = {(local.piece.kind, local.piece.key) for local in wanted}
    absent = set.union(*gather_objects({f"{kind}/{key}" for kind, key in mine - known}))
    if rank == 0 and (absent or unwanted):
        logger.warning(
            "%s: not strict: left as they are: %s; not read: %s",
            found.place,
            ", ".join(sorted(absent)) or "none",
            ", ".join(sorted(unwanted)) or "none",
        )
    return kept, set()


def _reads(plan: Callable[[], ReadPlan], place: str) -> ReadPlan:
    """Return `plan()`, or raise on all ranks the differences that all of them found. Collective."""

    def attempt() -> ReadPlan | tuple[str, ...]:
        try:
            return plan()
        except MissingStateError as error:
            return error.differences

    made = together(attempt)
    # A dict keeps the order of the first rank that found them.
    everywhere = dict.fromkeys(
        line
        for lines in gather_objects(() if isinstance(made, ReadPlan) else made)
        for line in lines
    )
    if everywhere or not isinstance(made, ReadPlan):
        raise missing_state(place, list(everywhere))
    return made


def _rank_state(found: SavedJob, rank: int) -> Piece | None:
    source = found.sources[rank]
    for piece in pieces_of(source.template, source.placement):
        if piece.kind == RANK_STATE:
            return piece
    return None


def _bytes_for(piece: Piece) -> torch.Tensor:
    return torch.empty(piece.nbytes, dtype=torch.uint8)
