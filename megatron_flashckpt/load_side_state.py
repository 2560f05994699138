"""Side state of a checkpoint for this rank, read before any tensor is overwritten.

Random and rerun state come from the rank that stood where this one stands. Param groups and extra
states of modules do too if the model is cut up as it was; otherwise rank 0 reads those of one rank
per pipeline stage and expert rank, and tells all others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.load_plan import LoadPlan, plan_reads
from megatron_flashckpt.megatron_lm import hyper_parameters, parallel, side_state
from megatron_flashckpt.megatron_lm.model_state import LocalPiece
from megatron_flashckpt.restore.collectives import broadcast_object, together
from megatron_flashckpt.saved_job import SavedJob

#: A few MiB at most: random states, param groups, what FP8 keeps of each module.
_MAX_NBYTES = 2**30


@dataclasses.dataclass(frozen=True)
class SideState:
    """What a rank gets beside tensors."""

    rank_state: dict[str, Any] | None
    """That of the rank which stood where this one stands; None if TP or PP have changed."""
    optimizer: list[dict[str, Any]]
    """Param groups, steps and scaler as `hyper_parameters.load_hyper_parameters` takes them."""
    objects: dict[str, Any]
    """Extra states of modules by global name."""


def load_side_state(found: SavedJob, rank: int, fill: Callable[[LoadPlan], Any]) -> SideState:
    """Return this rank's side state. Collective.

    Args:
        fill: carries out a plan, on all ranks together.
    """
    cut = parallel.model_cut()
    twin = found.twin(parallel.coordinates(), cut)
    sources = [] if twin is None else [twin]
    if rank == 0:
        sources += [source for source in found.representatives() if source != twin]
    pieces = {source: piece for source in sources if (piece := found.rank_state(source))}
    framed = together(
        lambda: {source: _room_for(piece, found.place) for source, piece in pieces.items()}
    )
    fill(plan_reads(found, [LocalPiece(piece, framed[source]) for source, piece in pieces.items()]))
    states = together(
        lambda: {
            source: side_state.unframe(content.numpy().tobytes(), found.place)
            for source, content in framed.items()
        }
    )
    own = None if twin is None else states.get(twin)
    groups, objects = broadcast_object(
        together(lambda: _merged(list(states.values())) if rank == 0 else None)
    )
    if own is not None and cut == found.model_cut:
        objects = own["objects"]
        if hyper_parameters.knows_steps(own["optimizer"]):
            groups = hyper_parameters.completed(own["optimizer"], groups)
    return SideState(own, groups, objects)


def _room_for(piece: Piece, place: str) -> torch.Tensor:
    """Return memory for a side state; what a table of contents claims may be anything."""
    if piece.nbytes > _MAX_NBYTES:
        raise CorruptCheckpointError(
            f"{place}: claims {piece.nbytes} bytes of side state of one rank; load an older "
            "iteration with --ckpt-step"
        )
    return torch.empty(piece.nbytes, dtype=torch.uint8)


def _merged(rank_states: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    objects: dict[str, Any] = {}
    for state in rank_states:
        objects.update(state["objects"])
    return hyper_parameters.merge([state["optimizer"] for state in rank_states]), objects
