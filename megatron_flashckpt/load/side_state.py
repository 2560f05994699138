"""Side state of a checkpoint for this rank, read before any tensor is overwritten.

Random and rerun state come from the rank that was at this rank's coordinates. Param groups and
extra states of modules do too if the model is sharded as it was. Otherwise they are put together
from the states of one rank per pipeline stage and expert rank, which are assigned to the ranks.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import torch

from megatron_flashckpt.collectives import gathered, this_rank, together, world_size
from megatron_flashckpt.errors import OLDER, CorruptCheckpointError
from megatron_flashckpt.file_format.file_names import common_name
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import Read, ReadPlan
from megatron_flashckpt.load.checkpoint_source import CheckpointSource
from megatron_flashckpt.load.chunk_reader import ChunkReader
from megatron_flashckpt.load.plan import LoadPlan
from megatron_flashckpt.load.request import LoadRequest, StateTypes
from megatron_flashckpt.load.source_job import SavedJob
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm import (
    hyper_parameters,
    parallel,
    side_state,
    side_state_codec,
)

#: A few MiB at most: random states, param groups, what FP8 keeps of each module.
_MAX_NBYTES = 2**30

_RankState = dict[str, Any]
"""Side state of one rank that saved, decoded."""


@dataclasses.dataclass(frozen=True)
class SideState:
    """State of a checkpoint beside its tensors, as one rank takes it."""

    common: dict[str, Any]
    """State that all ranks have in common: args, counters, the scheduler's."""
    rank_state: _RankState | None
    """That of the rank at the same coordinates; None if TP or PP have changed."""
    param_groups: list[dict[str, Any]]
    """Param groups, steps and scaler as `hyper_parameters.load_hyper_parameters` takes them."""
    objects: dict[str, Any]
    """Extra states of modules by global name."""


def read_side_state(request: LoadRequest, source: CheckpointSource) -> tuple[SideState, StateTypes]:
    """Return this rank's side state, and the optimizer states that any rank has to fill.

    Collective. An error on one rank is raised on all, so no rank continues without its state.

    Raises:
        FlashCkptError: on every rank alike.
    """
    together_read = None if source.reads_alone else _read_together(source)

    def read() -> tuple[
        tuple[dict[str, Any], _SideReads, _RankState | None], tuple[_RankStates, StateTypes]
    ]:
        request.raise_refusal()
        name = f"{source.job.place}/{common_name(source.origin.save_id)}"
        common = side_state_codec.decode_dict(source.common_state, name, side_state.COMMON_STATE)
        reads = together_read or _read_alone(source)
        own, assigned = reads.states()
        return (common, reads, own), (assigned, request.state_types(source.job))

    (common, reads, own), of_ranks = gathered(read)
    state = reads.merged(common, own, [assigned for assigned, _ in of_ranks])
    types: StateTypes = defaultdict(dict)
    for _, rank_types in of_ranks:
        for family, kinds in rank_types.items():
            types[family].update(kinds)
    return state, types


def _read_alone(source: CheckpointSource) -> _SideReads:
    reads = _SideReads(source.job)
    source.fill_alone(reads.plan)
    return reads


def _read_together(source: CheckpointSource) -> _SideReads:
    """Return the side reads of this rank, carried out on all ranks. Collective."""

    def opened() -> tuple[_SideReads, ChunkReader]:
        reads = _SideReads(source.job)
        return reads, source.open(reads.plan)

    reads, reader = together(opened)
    with reader:
        source.fill(reads.plan, reader)
    return reads


_RankStates = dict[int, _RankState]
"""By rank that saved."""


class _SideReads:
    """The side states that this rank reads. Nothing here communicates.

    Raises:
        CorruptCheckpointError: a table of contents claims what cannot be.
    """

    def __init__(self, job: SavedJob) -> None:
        self._job = job
        self._cut = parallel.model_cut()
        self._matching = job.matching_rank(parallel.coordinates(), self._cut)
        # In the layout that was saved each of these is its own, which the rank reads anyhow.
        self._assigned = [
            rank for rank in job.representatives() if rank % world_size() == this_rank()
        ]
        matching = [] if self._matching is None else [self._matching]
        self._framed: dict[int, torch.Tensor] = {}
        pieces: list[Piece] = []
        reads: dict[int, list[Read]] = {}
        for rank in dict.fromkeys([*matching, *self._assigned]):
            stored = job.rank_state(rank)
            if stored is not None:
                piece, position = stored
                self._framed[rank] = _room_for(piece, job.place)
                if piece.numel:
                    reads[rank] = [Read.whole(len(pieces), piece, position)]
                pieces.append(piece)
        targets = Targets(pieces, list(self._framed.values()))
        self.plan = LoadPlan(ReadPlan(reads, ()), pieces, targets, set())

    def states(self) -> tuple[_RankState | None, _RankStates]:
        """After `plan` was carried out: return the matching rank's state, and the parts of the
        states assigned to this rank that other ranks need.

        Raises:
            CorruptCheckpointError: one of them is damaged.
        """
        states = {
            rank: side_state.unframe(content.numpy().tobytes(), self._job.place)
            for rank, content in self._framed.items()
        }
        own = None if self._matching is None else states.get(self._matching)
        all_have_their_own = self._cut == self._job.model_cut and self._job.has_all_side_state
        needed = ("optimizer",) if all_have_their_own else ("optimizer", "objects")
        assigned = {
            rank: {name: states[rank][name] for name in needed}
            for rank in self._assigned
            if rank in states
        }
        return own, assigned

    def merged(
        self, common: dict[str, Any], own: _RankState | None, of_ranks: list[_RankStates]
    ) -> SideState:
        """Return this rank's side state.

        Args:
            own, of_ranks: what `states` returned here, and the assigned states of all ranks.
        """
        by_rank = {rank: state for states in of_ranks for rank, state in states.items()}
        assigned = [by_rank[rank] for rank in self._job.representatives() if rank in by_rank]
        groups = hyper_parameters.merge([state["optimizer"] for state in assigned])
        objects: dict[str, Any] = {}
        for state in assigned:
            objects.update(state.get("objects", {}))
        if own is not None and self._cut == self._job.model_cut:
            objects = own["objects"]
            if hyper_parameters.knows_steps(own["optimizer"]):
                groups = hyper_parameters.completed(own["optimizer"], groups)
        return SideState(common, own, groups, objects)


def _room_for(piece: Piece, place: str) -> torch.Tensor:
    """Return memory for a side state; a table of contents may claim any size."""
    if piece.nbytes > _MAX_NBYTES:
        raise CorruptCheckpointError(
            f"{place}: claims {piece.nbytes} bytes of side state of one rank; {OLDER}"
        )
    return torch.empty(piece.nbytes, dtype=torch.uint8)
