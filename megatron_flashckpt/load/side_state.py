"""Side state of a checkpoint for this rank, read before any tensor is overwritten.

Random and rerun state come from the rank that stood where this one stands. Param groups and extra
states of modules do too if the model is cut up as it was; otherwise they are put together from
those of one rank per pipeline stage and expert rank, which the ranks read between them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron_flashckpt.collectives import world_size
from megatron_flashckpt.errors import OLDER, CorruptCheckpointError
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import Read, ReadPlan
from megatron_flashckpt.load.plan import LoadPlan
from megatron_flashckpt.load.source_job import SavedJob
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm import hyper_parameters, parallel, side_state

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


class SideReads:
    """The side states that this rank reads. Nothing here communicates.

    Raises:
        CorruptCheckpointError: a table of contents claims what cannot be.
    """

    def __init__(self, found: SavedJob, rank: int) -> None:
        self._found = found
        self._cut = parallel.model_cut()
        self._twin = found.twin(parallel.coordinates(), self._cut)
        # In the layout that was saved each has its own, which it reads anyhow.
        self._dealt = [it for it in found.representatives() if it % world_size() == rank]
        sources = dict.fromkeys(self._dealt if self._twin is None else [self._twin, *self._dealt])
        self._framed: dict[int, torch.Tensor] = {}
        wanted: list[Piece] = []
        reads: dict[int, list[Read]] = {}
        for source in sources:
            stored = found.rank_state(source)
            if stored is not None:
                piece, position = stored
                self._framed[source] = _room_for(piece, found.place)
                if piece.numel:
                    reads[source] = [Read.whole(len(wanted), piece, position)]
                wanted.append(piece)
        targets = Targets(wanted, list(self._framed.values()))
        self.plan = LoadPlan(ReadPlan(reads, ()), wanted, targets, set())

    def states(self) -> tuple[dict[str, Any] | None, dict[int, dict[str, Any]]]:
        """Return the state of the rank that stood here, and what all others need of those dealt
        to this rank, once `plan` was carried out.

        Raises:
            CorruptCheckpointError: one of them is damaged.
        """
        states = {
            source: side_state.unframe(content.numpy().tobytes(), self._found.place)
            for source, content in self._framed.items()
        }
        own = None if self._twin is None else states.get(self._twin)
        everyone_has_its_own = self._cut == self._found.model_cut and self._found.has_all_side_state
        needed = ("optimizer",) if everyone_has_its_own else ("optimizer", "objects")
        dealt = {
            source: {name: states[source][name] for name in needed}
            for source in self._dealt
            if source in states
        }
        return own, dealt

    def merged(
        self, own: dict[str, Any] | None, everyone: list[dict[int, dict[str, Any]]]
    ) -> SideState:
        """Return this rank's side state from its own and what all ranks have told of theirs."""
        dealt = {source: state for states in everyone for source, state in states.items()}
        told = [dealt[source] for source in self._found.representatives() if source in dealt]
        groups = hyper_parameters.merge([state["optimizer"] for state in told])
        objects: dict[str, Any] = {}
        for state in told:
            objects.update(state.get("objects", {}))
        if own is not None and self._cut == self._found.model_cut:
            objects = own["objects"]
            if hyper_parameters.knows_steps(own["optimizer"]):
                groups = hyper_parameters.completed(own["optimizer"], groups)
        return SideState(own, groups, objects)


def _room_for(piece: Piece, place: str) -> torch.Tensor:
    """Return memory for a side state; what a table of contents claims may be anything."""
    if piece.nbytes > _MAX_NBYTES:
        raise CorruptCheckpointError(
            f"{place}: claims {piece.nbytes} bytes of side state of one rank; {OLDER}"
        )
    return torch.empty(piece.nbytes, dtype=torch.uint8)
