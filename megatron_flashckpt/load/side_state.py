"""Side state of a checkpoint for this rank, read before any tensor is overwritten.

Random and rerun state come from the saving rank at this rank's coordinates. So do param groups and
extra states of modules if the sharding is unchanged. Otherwise they are merged from the states of
one saving rank per pipeline stage and expert rank; the loading ranks share the reading of these.
Extra states are also merged if stages of an unchanged number hold other layers (an uneven or
interleaved pipeline).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from megatron_flashckpt.collectives import (
    gather_objects,
    run_and_agree,
    run_and_gather,
    this_rank,
    world_size,
)
from megatron_flashckpt.errors import OLDER, CorruptCheckpointError
from megatron_flashckpt.file_format.file_names import common_name
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import Read, ReadPlan
from megatron_flashckpt.load.checkpoint_source import CheckpointSource
from megatron_flashckpt.load.chunk_reader import ChunkReader, chunk_reads
from megatron_flashckpt.load.load_request import LoadRequest, StateTypes
from megatron_flashckpt.load.plan import LoadPlan
from megatron_flashckpt.load.saved_job import SavedJob
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm import (
    hyper_parameters,
    parallel,
    side_state,
)

#: Upper bound of a rank's side state: a few MiB of random states, param groups and FP8 states.
_MAX_NBYTES = 2**30

_RankState = dict[str, Any]
"""Decoded side state of one saving rank."""


@dataclasses.dataclass(frozen=True)
class SideState:
    """State of a checkpoint in addition to its tensors, for one loading rank."""

    common: dict[str, Any]
    """State that is equal on all ranks: args, counters, scheduler state."""
    rank_state: _RankState | None
    """Side state of the saving rank at the same coordinates; None if TP or PP has changed."""
    param_groups: list[dict[str, Any]]
    """Param groups, steps and scaler as `hyper_parameters.load_hyper_parameters` takes them."""
    objects: dict[str, Any]
    """Extra states of modules by global name."""


def read_side_state(request: LoadRequest, source: CheckpointSource) -> tuple[SideState, StateTypes]:
    """Return this rank's side state, and the optimizer states that any rank must fill.

    Collective. An error on one rank is raised on all, so a rank never continues without its
    state.

    Raises:
        FlashCkptError: on every rank.
    """
    collective_reads = None if source.reads_alone else _read_together(source)

    def read() -> tuple[
        tuple[dict[str, Any], _SideReads, _RankState | None],
        tuple[_RankStates, StateTypes, bool],
    ]:
        request.raise_refusal()
        name = f"{source.job.place}/{common_name(source.origin.save_id)}"
        common = side_state.decode_common(source.common_state, name, request.policy.needs)
        reads = collective_reads or _read_alone(source)
        own, assigned = reads.states()
        lacks = reads.lacks(own, request.extra_states())
        return (common, reads, own), (assigned, request.state_types(source.job), lacks)

    (common, reads, own), by_rank = run_and_gather(read)
    all_assigned = [assigned for assigned, *_ in by_rank]
    if any(lacks for *_, lacks in by_rank):
        all_assigned += gather_objects(reads.objects)
    state = reads.merged(common, own, all_assigned)
    types: StateTypes = defaultdict(dict)
    for _, rank_types, _ in by_rank:
        for family, kinds in rank_types.items():
            types[family].update(kinds)
    return state, types


def _read_alone(source: CheckpointSource) -> _SideReads:
    reads = _SideReads(source.job)
    plan = reads.plan
    with source.open(plan) as reader:
        reader.read(chunk_reads(plan.reads, plan.pieces), plan.targets)
    return reads


def _read_together(source: CheckpointSource) -> _SideReads:
    """Run the side reads of all ranks together; return those of this rank. Collective."""

    def opened() -> tuple[_SideReads, ChunkReader]:
        reads = _SideReads(source.job)
        return reads, source.open(reads.plan)

    reads, reader = run_and_agree(opened)
    with reader:
        source.fill(reads.plan, reader)
    return reads


_RankStates = dict[int, _RankState]
"""Side states by saving rank."""


class _SideReads:
    """The side states that this rank reads. Nothing here communicates.

    Raises:
        CorruptCheckpointError: a table of contents claims an impossible size or place.
    """

    def __init__(self, job: SavedJob) -> None:
        self._job = job
        self._model_sizes = parallel.model_sizes()
        self._matching = job.matching_rank(parallel.coordinates(), self._model_sizes)
        # If the layout is unchanged, an assigned state is the rank's own, which it reads anyway.
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
        self.objects: _RankStates = {}
        """The extra states in the assigned states, after `states`."""

    def states(self) -> tuple[_RankState | None, _RankStates]:
        """Return the matching rank's state, and the assigned states that other ranks need.

        Called after `plan` has run. The assigned states are reduced to the parts that are needed.

        Raises:
            CorruptCheckpointError: a state is damaged.
        """
        states = {
            rank: side_state.unframe(content.numpy().tobytes(), self._job.place)
            for rank, content in self._framed.items()
        }
        own = None if self._matching is None else states.get(self._matching)
        needed = ("optimizer",) if self._ranks_have_objects else ("optimizer", "objects")
        assigned = {rank: states[rank] for rank in self._assigned if rank in states}
        self.objects = {rank: {"objects": state["objects"]} for rank, state in assigned.items()}
        return own, {
            rank: {name: state[name] for name in needed} for rank, state in assigned.items()
        }

    @property
    def _ranks_have_objects(self) -> bool:
        """True if every rank takes extra states of modules from the matching rank's state."""
        return self._model_sizes == self._job.model_sizes and self._job.has_all_side_state

    def lacks(self, own: _RankState | None, names: Iterable[str]) -> bool:
        """Return whether this rank needs `objects` of other ranks, which `states` left out.

        Args:
            own: the matching rank's state, from `states`.
            names: global names of the extra states of this rank's modules.
        """
        return (
            own is not None and self._ranks_have_objects and not own["objects"].keys() >= set(names)
        )

    def merged(
        self, common: dict[str, Any], own: _RankState | None, all_assigned: list[_RankStates]
    ) -> SideState:
        """Return this rank's side state.

        Args:
            own: the matching rank's state, from `states`.
            all_assigned: the assigned states of all ranks, from `states`, and perhaps `objects`.
        """
        by_rank: _RankStates = defaultdict(dict)
        for states in all_assigned:
            for rank, state in states.items():
                by_rank[rank] = by_rank[rank] | state
        assigned = [by_rank[rank] for rank in self._job.representatives() if rank in by_rank]
        groups = hyper_parameters.merge([state["optimizer"] for state in assigned])
        objects: dict[str, Any] = {}
        for state in assigned:
            objects.update(state.get("objects", {}))
        if own is not None and self._model_sizes == self._job.model_sizes:
            objects |= own["objects"]
            if hyper_parameters.knows_steps(own["optimizer"]):
                groups = hyper_parameters.completed(own["optimizer"], groups)
        return SideState(common, own, groups, objects)


def _room_for(piece: Piece, place: str) -> torch.Tensor:
    """Allocate memory for a side state, whose size a damaged table of contents may overstate."""
    if piece.nbytes > _MAX_NBYTES:
        raise CorruptCheckpointError(
            f"{place}: claims {piece.nbytes} bytes of side state of one rank; {OLDER}"
        )
    return torch.empty(piece.nbytes, dtype=torch.uint8)
