"""Plans what a load reads on each rank, after all ranks have checked that nothing is missing."""

from __future__ import annotations

import dataclasses
import itertools
import logging
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
    this_rank,
    world_size,
)
from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.layout.copies import copy_kind
from megatron_flashckpt.layout.piece import BUFFER, MASTER, UNUSED, WEIGHT, Piece
from megatron_flashckpt.layout.read_plan import ReadPlan, missing_state, read_plan, superfluous
from megatron_flashckpt.load.request import LoadRequest, Names, StateTypes
from megatron_flashckpt.load.source_job import SavedJob
from megatron_flashckpt.load.targets import Targets
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.copy_check import named
from megatron_flashckpt.megatron_lm.cutting import LocalPiece

logger = logging.getLogger(__name__)

#: Differences that an error lists: thousands of ranks may each find others.
_MOST_DIFFERENCES = 1000


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

    def zero_padding(self) -> None:
        """Zero what no read fills: the rows by which this vocabulary is padded further."""
        for index in self.reads.padded:
            self.targets.zero(index)

    def finish(self) -> None:
        """Copy back what was filled in the place of tensors that are not contiguous."""
        with torch.no_grad():
            for tensor, filled in self.copies:
                tensor.copy_(filled)


def plan_load(
    request: LoadRequest,
    job: SavedJob,
    param_groups: list[dict[str, Any]],
    state_types: StateTypes,
) -> LoadPlan:
    """Return the reads of this rank, once all ranks agree that they may be carried out. Collective.

    Args:
        job: the ranks that saved the checkpoint.
        param_groups: those of the checkpoint.
        state_types: the states to fill, as all ranks found them.

    Raises:
        MissingStateError: on every rank; lists the differences of all ranks; nothing was
            overwritten. Without `strict`, missing state keeps its values, unexpected state is not
            read, and rank 0 logs both.
    """
    planner = _RankPlanner(request, job)
    planned, findings = gathered(lambda: planner.plan(param_groups, state_types))
    unexpected, replaced = _agreed_names(planner, job, planned, findings)
    _raise_missing(request, job, findings, unexpected)
    raise_agreed([finding.refusal for finding in findings], planned.refusal)
    if this_rank() == 0:
        _log_lenience(job, findings, unexpected)
        _log_replaced(job, replaced, same_tensor_ranks=planner.has_same_tensor_ranks)
    assert planned.plan is not None
    return planned.plan


@dataclasses.dataclass(frozen=True)
class _Planned:
    """The plan of one rank, for itself."""

    plan: LoadPlan | None
    names: Names
    """Of all tensors of this rank's model, read or made of what is read."""
    refusal: Exception | None = None
    replaced: frozenset[str] = frozenset()
    """Keys of tensors of which it takes the main copy, though its own was another one."""


@dataclasses.dataclass(frozen=True)
class _Findings:
    """What one rank tells all others of its plan: no more than `cut_list` leaves."""

    differences: tuple[str, ...]
    sees_unexpected: bool
    """True if the shards that it looked at hold tensors that its model does not have."""
    missing: tuple[str, ...]
    """Names that it wants and that are not in the checkpoint at all."""
    refusal: Said | None = None
    """Why it refuses the load, for other reasons than differences."""
    replaces: bool = False
    """True if it takes the main copy of a tensor, though its own was another one."""


class _RankPlanner:
    """Plans the reads of this rank. Nothing here communicates."""

    def __init__(self, request: LoadRequest, job: SavedJob) -> None:
        self._request = request
        self._job = job
        self.has_same_tensor_ranks = job.model_cut[0] == parallel.model_cut()[0]
        # Copies belong to tensor ranks: with another number of them no rank's copy is its own.
        self._copies = job.copies if self.has_same_tensor_ranks else frozenset()
        optimizer_kinds = job.optimizer_kinds if request.optimizer else set()
        self._kinds = {WEIGHT, BUFFER} | optimizer_kinds

    def plan(
        self, param_groups: list[dict[str, Any]], state_types: StateTypes
    ) -> tuple[_Planned, _Findings]:
        """Return the plan of this rank, and what all others must know of it.

        Raises:
            FlashCkptError: this rank can plan nothing, whatever the checkpoint has.
        """
        wanted = self._request.pieces(self._job, state_types)
        requantized = self._request.requantized()
        pieces = self._as_stored(wanted)
        wanted_names = {(piece.kind, piece.key) for piece in pieces}
        names = wanted_names | requantized
        unused, missing = self._not_stored(wanted_names)
        sees_unexpected = self._sees_unexpected(names)
        told_missing = cut_list(sorted({f"{kind}/{key}" for kind, key in missing}))
        left_out = unused if self._request.strict else unused | missing
        if left_out:
            kept = [n for n, it in enumerate(pieces) if (it.kind, it.key) not in left_out]
            wanted, pieces = [wanted[n] for n in kept], [pieces[n] for n in kept]
        try:
            plan = self._reads(wanted, pieces)
        except MissingStateError as error:
            differences = cut_list(error.differences)
            return _Planned(None, names), _Findings(differences, sees_unexpected, told_missing)
        checked = attempt(lambda: self._request.check(plan.names, param_groups, self._job.place))
        replaced = self._replaced(wanted)
        return (
            _Planned(plan, names, checked.error, replaced),
            _Findings((), sees_unexpected, told_missing, checked.said, bool(replaced)),
        )

    def _as_stored(self, wanted: list[LocalPiece]) -> list[Piece]:
        """Return the stored pieces that `wanted` are filled from."""
        if not (self._job.derived_keys or self._copies):
            return [local.piece for local in wanted]
        return [self._one_as_stored(local) for local in wanted]

    def _one_as_stored(self, local: LocalPiece) -> Piece:
        """Return the piece that `local` is filled from.

        That is the part of the master that a weight is made of, if weights are not stored; and of
        this rank's own copy, if that is stored.
        """
        piece, job = local.piece, self._job
        is_derived = piece.kind == WEIGHT and piece.key in job.derived_keys
        if is_derived and (piece.key, piece.dtype) not in job.stored_weights:
            piece = msgspec.structs.replace(piece, kind=MASTER, dtype="F32")
        if local.copy and (piece.key, local.copy) in self._copies:
            piece = msgspec.structs.replace(piece, kind=copy_kind(piece.kind, local.copy))
        return piece

    def _not_stored(self, names: Names) -> tuple[Names, Names]:
        """Return which of `names` no forward uses, and which are missing; neither is stored."""
        absent = names - self._job.names
        unused = {(kind, key) for kind, key in absent if key.endswith(UNUSED)}
        return unused, absent - unused

    def _sees_unexpected(self, names: Names) -> bool:
        """Return whether this rank's part of the shards has tensors that its model does not have.

        The ranks look at all shards between them, in the layout that was saved each at its own.
        """
        shards = self._job.sources[this_rank() :: world_size()] if self._request.fill else []
        return bool(superfluous(names, shards, self._kinds))

    def _reads(self, wanted: list[LocalPiece], pieces: list[Piece]) -> LoadPlan:
        """Return how to fill `wanted` from the stored `pieces`.

        Raises:
            MissingStateError: lists the differences of this rank.
        """
        job = self._job
        saver = job.matching_rank(parallel.coordinates(), parallel.model_cut())
        resizable = {n for n, local in enumerate(wanted) if local.resizable}
        reads = read_plan(pieces, job.sources, job.place, resizable, job.held_by(saver))
        names = {(local.piece.kind, local.piece.key) for local in wanted}
        copies = {id(local.origin[1]): local.origin for local in wanted if local.origin is not None}
        targets = Targets(pieces, [local.tensor for local in wanted])
        return LoadPlan(reads, pieces, targets, names, tuple(copies.values()))

    def _replaced(self, wanted: list[LocalPiece]) -> frozenset[str]:
        """Return the keys of which this rank gets the main copy in place of a copy of its own."""
        return frozenset(
            local.piece.key
            for local in wanted
            if local.piece.key in self._job.differing
            and (
                not self.has_same_tensor_ranks
                or (local.copy and (local.piece.key, local.copy) not in self._copies)
            )
        )

    def expects(self, name: tuple[str, str], names: Names) -> bool:
        """Return whether a stored tensor is among `names`, or need not be read by any rank."""
        kind, key = name
        is_read = self._request.fill and kind in self._kinds and not key.endswith(UNUSED)
        return name in names or not is_read


def _agreed_names(
    planner: _RankPlanner, job: SavedJob, planned: _Planned, findings: list[_Findings]
) -> tuple[set[str], set[str]]:
    """Return which stored tensors no rank expects, and of which keys copies are replaced.

    Collective, but free if no rank has seen any. A tensor that one rank does not expect may be
    another's, so every rank answers for all names, which all ranks know.
    """
    if not any(finding.sees_unexpected or finding.replaces for finding in findings):
        return set(), set()
    names, keys = sorted(job.names), sorted(job.differing)
    flags = reduce_flags(
        [planner.expects(name, planned.names) for name in names]
        + [key in planned.replaced for key in keys]
    )
    expected, replaced = flags[: len(names)], flags[len(names) :]
    unexpected = itertools.compress(names, (not is_expected for is_expected in expected))
    return {f"{kind}/{key}" for kind, key in unexpected}, set(itertools.compress(keys, replaced))


def _raise_missing(
    request: LoadRequest, job: SavedJob, findings: list[_Findings], unexpected: set[str]
) -> None:
    """Raise if any rank has found differences that this load does not allow.

    Args:
        unexpected: stored tensors that no rank's model has, as `kind/key`.
    """
    found = [line for finding in findings for line in finding.differences]
    differences = list(dict.fromkeys(found))
    if (more := len(differences) - _MOST_DIFFERENCES) > 0:
        differences = [*differences[:_MOST_DIFFERENCES], f"... and {more} more on all ranks"]
    refused = unexpected if request.strict else set()
    if differences or refused:
        raise missing_state(job.place, differences, refused)


def _log_lenience(job: SavedJob, findings: list[_Findings], unexpected: set[str]) -> None:
    missing = set().union(*(finding.missing for finding in findings))
    if missing or unexpected:
        logger.warning(
            "%s: not strict: left as they are: %s; not read: %s",
            job.place,
            ", ".join(sorted(missing)) or "none",
            ", ".join(sorted(unexpected)) or "none",
        )


def _log_replaced(job: SavedJob, keys: set[str], *, same_tensor_ranks: bool) -> None:
    if not keys:
        return
    reason = "the tensor parallel size is another"
    if same_tensor_ranks:
        reason = "no other copies were saved"
    logger.warning(
        "%s: ranks held different copies of %s, which should be equal. All ranks now get the "
        "first copy of each, because %s: training continues as from one of Megatron's own "
        "checkpoints, not bit for bit",
        job.place,
        named(keys),
        reason,
    )
