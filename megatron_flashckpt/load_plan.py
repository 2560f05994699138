"""What a load reads on this rank: all ranks together check that it is all there, then plan."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.layout.copies import copy_kind, is_copy
from megatron_flashckpt.layout.coverage import ReadPlan, missing_state, read_plan, superfluous
from megatron_flashckpt.layout.piece import BUFFER, MASTER, RANK_STATE, WEIGHT, Piece
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.copy_check import named
from megatron_flashckpt.megatron_lm.dtypes import torch_dtype
from megatron_flashckpt.megatron_lm.model_state import LocalPiece
from megatron_flashckpt.restore.collectives import (
    Said,
    attempt,
    gather_objects,
    gathered,
    raise_agreed,
    world_size,
)
from megatron_flashckpt.restore.targets import Targets
from megatron_flashckpt.saved_job import SavedJob

logger = logging.getLogger(__name__)

Names = set[tuple[str, str]]
"""Kinds and keys."""


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """What a load fills, and how strict it is. Equal on all ranks but for the model."""

    chunks: list[Any]
    optimizer: Any
    """None: weights only."""
    strict: bool
    fill: bool = True
    """False: only the side state is wanted."""
    overwritten: Names = dataclasses.field(default_factory=set)
    """Kind and key of what this rank's model has from a checkpoint that turned out to be damaged:
    whatever is loaded in its place must replace all of it."""


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """The reads of this rank, and where they go."""

    reads: ReadPlan
    pieces: list[Piece]
    targets: Targets
    names: Names
    """Kind and key of all that is filled."""

    def zero_padding(self) -> None:
        """Zero what no read fills: the rows by which this vocabulary is padded further."""
        for index in self.reads.padded:
            self.targets.zero(index)


@dataclasses.dataclass(frozen=True)
class _Findings:
    """What one rank found out when it planned, for all to know."""

    differences: tuple[str, ...]
    unwanted: set[str]
    """Names that it does not want, of those in the shards that are its own to look at."""
    absent: set[str]
    """Names that it wants and that are not there at all."""
    refusal: Said | None
    """What speaks against the load beside that."""
    replaced: set[str]
    """Keys of tensors of which it takes the main copy, though its own was another one."""


def plan_load(
    request: LoadRequest,
    wanted: Callable[[], list[LocalPiece]],
    found: SavedJob,
    rank: int,
    check: Callable[[Names], None],
    unread: Names,
) -> LoadPlan:
    """Return the reads of this rank, coverage checked. Collective.

    Without `strict`, what is not in the checkpoint is left as it is, what is not in the model is
    not read, and rank 0 says so.

    Args:
        wanted: returns what this rank wants.
        check: raises if something else speaks against filling such names.
        unread: names in this rank's model that are made of other tensors after the load.

    Raises:
        MissingStateError: on every rank; lists all differences, nothing was overwritten.
    """
    masters = _masters_for_weights(found)
    known = {(kind, key) for kind, key, _, _ in found.tensors}
    # With another number of tensor ranks nobody stands where a rank stood.
    is_same_tp = found.model_cut[0] == parallel.model_cut()[0]
    copies = found.copies if is_same_tp else frozenset()

    def look() -> tuple[_Planned, _Findings]:
        mine = wanted()
        pieces = [_as_stored(it, masters, copies) if masters or copies else it.piece for it in mine]
        names = {(piece.kind, piece.key) for piece in pieces}
        # Between them ranks look at all shards, in the layout that was saved each at its own.
        shards = found.sources[rank :: world_size()] if request.fill else []
        kinds = {WEIGHT, BUFFER} | (_optimizer_kinds(found) if request.optimizer else set())
        unwanted = superfluous(names | unread, shards, kinds)
        lacking = names - known
        absent = {f"{kind}/{key}" for kind, key in lacking}
        if lacking and not request.strict:
            there = [n for n, it in enumerate(pieces) if (it.kind, it.key) not in lacking]
            mine, pieces = [mine[n] for n in there], [pieces[n] for n in there]
        try:
            plan = _plan(mine, pieces, found)
        except MissingStateError as error:
            return _Planned(None, names, None), _Findings(
                error.differences, unwanted, absent, None, set()
            )
        refused = attempt(lambda: check(plan.names))
        replaced = {
            local.piece.key
            for local in mine
            if local.piece.key in found.differing
            and (not is_same_tp or (local.copy and (local.piece.key, local.copy) not in copies))
        }
        return _Planned(plan, names, refused.error), _Findings(
            (), unwanted, absent, refused.said, replaced
        )

    planned, everyone = gathered(look)
    unwanted = set().union(*(found.unwanted for found in everyone))
    if unwanted:  # by one rank; the others may want it
        mine = {f"{kind}/{key}" for kind, key in planned.names | unread}
        unwanted = set.intersection(*gather_objects(unwanted - mine))
    differences = [line for found in everyone for line in found.differences]
    if differences or (unwanted and request.strict):
        raise missing_state(found.place, differences, unwanted if request.strict else ())
    raise_agreed([found.refusal for found in everyone], planned.refusal)
    absent = set().union(*(found.absent for found in everyone))
    if rank == 0 and (absent or unwanted):
        logger.warning(
            "%s: not strict: left as they are: %s; not read: %s",
            found.place,
            ", ".join(sorted(absent)) or "none",
            ", ".join(sorted(unwanted)) or "none",
        )
    replaced = set().union(*(found.replaced for found in everyone))
    if rank == 0 and replaced:
        logger.warning(
            "%s: ranks held different values of %s, though they should hold the same ones. Each "
            "now gets those of the first rank, because %s: training continues as from one of "
            "Megatron's own checkpoints, not bit for bit",
            found.place,
            named(replaced),
            "no other copies were saved" if is_same_tp else "the tensor parallel size is another",
        )
    assert planned.plan is not None
    return planned.plan


@dataclasses.dataclass(frozen=True)
class _Planned:
    """What one rank planned, for itself."""

    plan: LoadPlan | None
    names: Names
    refusal: Exception | None


def _plan(wanted: list[LocalPiece], pieces: list[Piece], found: SavedJob) -> LoadPlan:
    """Return how to fill `wanted` from `pieces`, which is what there is of it."""
    twin = found.twin(parallel.coordinates(), parallel.model_cut())
    resizable = {n for n, local in enumerate(wanted) if local.resizable}
    reads = read_plan(pieces, found.sources, found.place, resizable, found.held_by(twin))
    names = {(local.piece.kind, local.piece.key) for local in wanted}
    return LoadPlan(reads, pieces, Targets(pieces, [local.tensor for local in wanted]), names)


def _masters_for_weights(found: SavedJob) -> set[str]:
    """Return the keys that have a master but no weight: `weights: derive` when they were saved."""
    weights = {key for kind, key, _, _ in found.tensors if kind == WEIGHT}
    masters = {key for kind, key, dtype, _ in found.tensors if (kind, dtype) == (MASTER, "F32")}
    return masters - weights


def _as_stored(local: LocalPiece, masters: set[str], copies: frozenset[tuple[str, str]]) -> Piece:
    """Return the piece that `local` is filled from.

    That is the part of the master that a weight is made of, if weights are not stored; and of this
    rank's own copy, if that is stored.
    """
    piece = local.piece
    if piece.kind == WEIGHT and piece.key in masters:
        piece = msgspec.structs.replace(piece, kind=MASTER, dtype="F32")
    if local.copy and (piece.key, local.copy) in copies:
        piece = msgspec.structs.replace(piece, kind=copy_kind(piece.kind, local.copy))
    return piece


def _optimizer_kinds(found: SavedJob) -> set[str]:
    kinds = {kind for kind, *_ in found.tensors if not is_copy(kind)}
    return kinds - {WEIGHT, BUFFER, RANK_STATE} | {MASTER}


def optimizer_states(found: SavedJob) -> dict[str, dict[str, torch.dtype]]:
    """Return, by key, the types of the optimizer's states that the checkpoint has, by kind."""
    stored: dict[str, dict[str, torch.dtype]] = defaultdict(dict)
    for kind, key, dtype, _ in found.tensors:
        if kind not in (WEIGHT, MASTER, BUFFER, RANK_STATE) and not is_copy(kind):
            stored[key][kind] = torch_dtype(dtype)
    return stored
