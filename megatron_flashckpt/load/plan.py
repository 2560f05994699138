"""What a load reads on this rank: all ranks together check that it is all there, then plan."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

from megatron_flashckpt.collectives import (
    Said,
    attempt,
    cut_list,
    gathered,
    raise_agreed,
    reduce_flags,
    world_size,
)
from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.layout.copies import copy_kind, is_copy
from megatron_flashckpt.layout.exact_match import typed_runs
from megatron_flashckpt.layout.piece import (
    BUFFER,
    MASTER,
    RANK_STATE,
    UNUSED,
    WEIGHT,
    Piece,
    Shape,
)
from megatron_flashckpt.layout.read_plan import ReadPlan, missing_state, read_plan, superfluous
from megatron_flashckpt.layout.reshard import Run, overlap
from megatron_flashckpt.load.source_job import SavedJob
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.copy_check import named
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.torch_dtypes import SIXTEEN_BIT, torch_dtype

logger = logging.getLogger(__name__)

#: Differences that an error lists: thousands of ranks may each find others.
_MOST_DIFFERENCES = 1000

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
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """Tensors that are not contiguous, each with the copy that is filled in its place."""

    def finish(self) -> None:
        """Copy back what was filled in the place of tensors that are not contiguous."""
        with torch.no_grad():
            for tensor, filled in self.copies:
                tensor.copy_(filled)

    def zero_padding(self) -> None:
        """Zero what no read fills: the rows by which this vocabulary is padded further."""
        for index in self.reads.padded:
            self.targets.zero(index)


@dataclasses.dataclass(frozen=True)
class _Findings:
    """What one rank found out when it planned, for all to know: no more than `cut_list` leaves."""

    differences: tuple[str, ...]
    sees_unwanted: bool
    """Whether it does not want all that is in the shards which are its own to look at."""
    absent: tuple[str, ...]
    """Names that it wants and that are not there at all."""
    refusal: Said | None
    """What speaks against the load beside that."""
    replaces: bool
    """Whether it takes the main copy of a tensor, though its own was another one."""


def plan_load(
    request: LoadRequest,
    wanted: Callable[[], list[LocalPiece]],
    found: SavedJob,
    rank: int,
    check: Callable[[Names], None],
    unread: Callable[[], Names],
) -> LoadPlan:
    """Return the reads of this rank, coverage checked. Collective.

    Without `strict`, what is not in the checkpoint is left as it is, what is not in the model is
    not read, and rank 0 says so.

    Args:
        wanted: returns what this rank wants.
        check: raises if something else speaks against filling such names.
        unread: returns names in this rank's model that are made of other tensors after the load.

    Raises:
        MissingStateError: on every rank; lists all differences, nothing was overwritten.
    """
    masters = _masters_for_weights(found)
    weights = {(key, dtype) for kind, key, dtype, _ in found.tensors if kind == WEIGHT}
    known = {(kind, key) for kind, key, _, _ in found.tensors}
    # With another number of tensor ranks nobody stands where a rank stood.
    is_same_tp = found.model_cut[0] == parallel.model_cut()[0]
    copies = found.copies if is_same_tp else frozenset()

    kinds = {WEIGHT, BUFFER} | (_optimizer_kinds(found) if request.optimizer else set())

    def is_looked_at(kind: str, key: str) -> bool:
        return request.fill and kind in kinds and not key.endswith(UNUSED)

    def look() -> tuple[_Planned, _Findings]:
        mine, made = wanted(), unread()
        uses_others = bool(masters or copies)
        pieces = [
            _as_stored(it, masters, weights, copies) if uses_others else it.piece for it in mine
        ]
        names = {(piece.kind, piece.key) for piece in pieces}
        # Between them ranks look at all shards, in the layout that was saved each at its own.
        shards = found.sources[rank :: world_size()] if request.fill else []
        unwanted = superfluous(names | made, shards, kinds)
        unused = {(kind, key) for kind, key in names - known if key.endswith(UNUSED)}
        lacking = names - known - unused
        absent = {f"{kind}/{key}" for kind, key in lacking}
        left = unused if request.strict else unused | lacking
        if left:
            there = [n for n, it in enumerate(pieces) if (it.kind, it.key) not in left]
            mine, pieces = [mine[n] for n in there], [pieces[n] for n in there]
        try:
            plan = _plan(mine, pieces, found)
        except MissingStateError as error:
            differences = cut_list(error.differences)
            return _Planned(None, names | made, None), _Findings(
                differences, bool(unwanted), cut_list(sorted(absent)), None, False
            )
        refused = attempt(lambda: check(plan.names))
        replaced = {
            local.piece.key
            for local in mine
            if local.piece.key in found.differing
            and (not is_same_tp or (local.copy and (local.piece.key, local.copy) not in copies))
        }
        return _Planned(plan, names | made, refused.error, frozenset(replaced)), _Findings(
            (), bool(unwanted), cut_list(sorted(absent)), refused.said, bool(replaced)
        )

    planned, everyone = gathered(look)
    unwanted, replaced = set[str](), set[str]()
    if any(it.sees_unwanted or it.replaces for it in everyone):
        # What one rank does not want another may. All know the names in the checkpoint.
        names, keys = sorted(known), sorted(found.differing)
        mine = planned.names
        is_mine = [(kind, key) in mine or not is_looked_at(kind, key) for kind, key in names]
        flags = reduce_flags(is_mine + [key in planned.replaced for key in keys])
        of_none = [name for name, is_of_any in zip(names, flags, strict=False) if not is_of_any]
        unwanted = {f"{kind}/{key}" for kind, key in of_none}
        replaced = set(itertools.compress(keys, flags[len(names) :]))
    differences = list(dict.fromkeys(line for it in everyone for line in it.differences))
    if (more := len(differences) - _MOST_DIFFERENCES) > 0:
        differences = [*differences[:_MOST_DIFFERENCES], f"... and {more} more on all ranks"]
    if differences or (unwanted and request.strict):
        raise missing_state(found.place, differences, unwanted if request.strict else ())
    raise_agreed([found.refusal for found in everyone], planned.refusal)
    absent = set().union(*(it.absent for it in everyone))
    if rank == 0 and (absent or unwanted):
        logger.warning(
            "%s: not strict: left as they are: %s; not read: %s",
            found.place,
            ", ".join(sorted(absent)) or "none",
            ", ".join(sorted(unwanted)) or "none",
        )
    if rank == 0 and replaced:
        logger.warning(
            "%s: ranks held different copies of %s, which should be equal. All ranks now get the "
            "first copy of each, because %s: training continues as from one of Megatron's own "
            "checkpoints, not bit for bit",
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
    """Of all that this rank's model has, read or made of what is read."""
    refusal: Exception | None
    replaced: frozenset[str] = frozenset()
    """Keys of tensors of which it takes the main copy, though its own was another one."""


def _plan(wanted: list[LocalPiece], pieces: list[Piece], found: SavedJob) -> LoadPlan:
    """Return how to fill `wanted` from `pieces`, which is what there is of it."""
    twin = found.twin(parallel.coordinates(), parallel.model_cut())
    resizable = {n for n, local in enumerate(wanted) if local.resizable}
    reads = read_plan(pieces, found.sources, found.place, resizable, found.held_by(twin))
    names = {(local.piece.kind, local.piece.key) for local in wanted}
    copies = {id(local.origin[1]): local.origin for local in wanted if local.origin is not None}
    targets = Targets(pieces, [local.tensor for local in wanted])
    return LoadPlan(reads, pieces, targets, names, tuple(copies.values()))


def _masters_for_weights(found: SavedJob) -> set[str]:
    """Return the keys whose 16-bit weights were saved as masters only (`weights: derive`).

    Layers of other types that share the key have no masters and are stored as weights.
    """
    numels: Counter[str] = Counter()
    shapes: dict[str, Shape] = {}
    masters: set[str] = set()
    stored: set[str] = set()
    for (kind, key, dtype, shape), numel in found.tensors.items():
        if kind == WEIGHT or (kind, dtype) == (MASTER, "F32"):
            numels[key] += numel
            shapes[key] = shape
        if (kind, dtype) == (MASTER, "F32"):
            masters.add(key)
        elif kind == WEIGHT and torch_dtype(dtype) in SIXTEEN_BIT:
            stored.add(key)
    # Offloading optimizers keep masters of fp32 weights, too, which are stored beside them.
    return {key for key in masters - stored if numels[key] <= math.prod(shapes[key])}


def _as_stored(
    local: LocalPiece,
    masters: set[str],
    weights: set[tuple[str, str]],
    copies: frozenset[tuple[str, str]],
) -> Piece:
    """Return the piece that `local` is filled from.

    That is the part of the master that a weight is made of, if weights are not stored; and of this
    rank's own copy, if that is stored.

    Args:
        weights: key and type of all stored weights.
    """
    piece = local.piece
    if piece.kind == WEIGHT and piece.key in masters and (piece.key, piece.dtype) not in weights:
        piece = msgspec.structs.replace(piece, kind=MASTER, dtype="F32")
    if local.copy and (piece.key, local.copy) in copies:
        piece = msgspec.structs.replace(piece, kind=copy_kind(piece.kind, local.copy))
    return piece


def _optimizer_kinds(found: SavedJob) -> set[str]:
    kinds = {kind for kind, *_ in found.tensors if not is_copy(kind)}
    return kinds - {WEIGHT, BUFFER, RANK_STATE} | {MASTER}


class StoredStates:
    """The states of the optimizer that a checkpoint has, and their types."""

    def __init__(self, found: SavedJob) -> None:
        self.by_key: dict[str, dict[str, torch.dtype]] = defaultdict(dict)
        """By key, the kinds of state and the type of each; one of them, where layers differ."""
        mixed: set[tuple[str, str]] = set()
        for kind, key, name, _ in found.tensors:
            if kind not in (WEIGHT, MASTER, BUFFER, RANK_STATE) and not is_copy(kind):
                dtype = torch_dtype(name)
                if self.by_key[key].setdefault(kind, dtype) != dtype:
                    mixed.add((kind, key))
        self._mixed = typed_runs(found.sources, mixed) if mixed else {}

    def dtype_of(self, kind: str, pieces: Iterable[Piece]) -> torch.dtype | None:
        """Return the type in which state of `kind` is stored of `pieces`; None if there is none.

        Args:
            pieces: those of one parameter; kind and type are not looked at.
        """
        for piece in pieces:
            for run, dtype in self._mixed.get((kind, piece.key), ()):
                if overlap(run, Run.of(piece)).numel:
                    return torch_dtype(dtype)
            if (kind, piece.key) not in self._mixed and kind in self.by_key.get(piece.key, {}):
                return self.by_key[piece.key][kind]
        return None
