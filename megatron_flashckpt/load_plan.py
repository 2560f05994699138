"""What a load reads on this rank: all ranks together check that it is all there, then plan."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import msgspec
import torch

from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.layout.coverage import ReadPlan, missing_state, read_plan, superfluous
from megatron_flashckpt.layout.piece import BUFFER, MASTER, RANK_STATE, WEIGHT, Piece
from megatron_flashckpt.layout.plan import stored_items
from megatron_flashckpt.megatron_lm.dtypes import torch_dtype
from megatron_flashckpt.megatron_lm.model_state import LocalPiece, ModelState
from megatron_flashckpt.restore.collectives import gather_objects, together
from megatron_flashckpt.restore.targets import Targets, is_rounded
from megatron_flashckpt.saved_job import SavedJob

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
    overwritten: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    """Kind and key of what this rank's model has from a checkpoint that turned out to be damaged:
    whatever is loaded in its place must replace all of it."""


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """The reads of this rank, and where they go."""

    reads: ReadPlan
    pieces: list[Piece]
    targets: Targets
    names: set[tuple[str, str]]
    """Kind and key of all that is filled."""

    def zero_padding(self) -> None:
        """Zero what no read fills: the rows by which this vocabulary is padded further."""
        for index in self.reads.padded:
            self.targets.zero(index)


def plan_load(request: LoadRequest, state: ModelState, found: SavedJob, rank: int) -> LoadPlan:
    """Return the reads of this rank, coverage checked. Collective.

    Raises:
        MissingStateError: on every rank; lists all differences, nothing was overwritten.
    """
    wanted, unwanted = _wanted(request, state, found, rank)
    resizable = {n for n, local in enumerate(wanted) if local.resizable}
    return plan_reads(found, wanted, unwanted, resizable)


def plan_reads(
    found: SavedJob,
    wanted: list[LocalPiece],
    unwanted: Collection[str] = (),
    resizable: Collection[int] = (),
) -> LoadPlan:
    """Return the reads that fill `wanted`, or raise on all ranks what any of them misses.

    Collective; the arguments are those of `layout.coverage.read_plan`.
    """
    pieces = [local.piece for local in wanted]

    def attempt() -> ReadPlan | tuple[str, ...]:
        try:
            return read_plan(pieces, found.sources, found.place, unwanted, resizable)
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
        raise missing_state(found.place, list(everywhere))
    names = {
        (WEIGHT if is_rounded(local.piece, local.tensor) else local.piece.kind, local.piece.key)
        for local in wanted
    }
    return LoadPlan(made, pieces, Targets(pieces, [local.tensor for local in wanted]), names)


def _masters_for_weights(found: SavedJob) -> set[str]:
    """Return the keys that have a master but no weight: `weights: derive` when they were saved."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for item in stored_items(found.sources):
        if item.kind == WEIGHT or (item.kind == MASTER and item.dtype == "F32"):
            kinds[item.key].add(item.kind)
    return {key for key, there in kinds.items() if there == {MASTER}}


def _master(weight: Piece) -> Piece:
    """Return the part of the master that `weight` is made of."""
    return msgspec.structs.replace(weight, kind=MASTER, dtype="F32")


def _wanted(
    request: LoadRequest, state: ModelState, found: SavedJob, rank: int
) -> tuple[list[LocalPiece], set[str]]:
    """Return what this rank wants, and the names of what no rank wants. Collective.

    Without `strict`, what is not in the checkpoint is left as it is, what is not in the model is
    not read, and rank 0 says so.
    """
    if not request.fill:
        return [], set()
    stored: dict[str, dict[str, torch.dtype]] = defaultdict(dict)
    for item in stored_items(found.sources):
        if item.kind not in (WEIGHT, MASTER, BUFFER, RANK_STATE):
            stored[item.key][item.kind] = torch_dtype(item.dtype)
    states: dict[str, dict[str, torch.dtype]] = defaultdict(dict)
    # What any rank finds counts for all: nothing that is missing for a whole rank goes unnoticed.
    for theirs in gather_objects(
        together(lambda: state.states_of(request.chunks, request.optimizer, stored))
    ):
        for family, kinds_there in theirs.items():
            states[family].update(kinds_there)
    masters = _masters_for_weights(found)
    wanted = [
        msgspec.structs.replace(local, piece=_master(local.piece))
        if local.piece.kind == WEIGHT and local.piece.key in masters
        else local
        for local in together(lambda: state.wanted(request.chunks, request.optimizer, states))
    ]
    kinds = {WEIGHT, BUFFER}
    if request.optimizer is not None:
        kinds |= {MASTER}.union(*stored.values())
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
