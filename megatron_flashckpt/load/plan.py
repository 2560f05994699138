"""Plan of each rank's reads, after all ranks have checked that the checkpoint has the state."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from megatron_flashckpt.collectives import (
    ErrorReport,
    attempt,
    raise_agreed,
    reduce_largest,
    run_and_gather,
    shorten_list,
    this_rank,
    world_size,
)
from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.layout.copies import as_copy, is_copy
from megatron_flashckpt.layout.piece import BUFFER, MASTER, UNUSED, WEIGHT, Piece, Shape
from megatron_flashckpt.layout.read_plan import (
    ReadPlan,
    missing_state,
    read_plan,
    stored_names,
    unexpected_tensors,
)
from megatron_flashckpt.load.load_request import LoadRequest, Names, StateTypes
from megatron_flashckpt.load.saved_job import SavedJob
from megatron_flashckpt.load.targets import Targets, is_converted
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.optimizer_flags import flags_as_stored
from megatron_flashckpt.megatron_lm.optimizer_state import MASTER_STATE
from megatron_flashckpt.megatron_lm.vocabulary import loses_words, resized

logger = logging.getLogger(__name__)

#: Upper bound of differences in an error: thousands of ranks may each report different ones.
_MOST_DIFFERENCES = 1000


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """The reads of this rank, and the tensors that they fill."""

    reads: ReadPlan
    pieces: list[Piece]
    targets: Targets
    names: Names
    """Kind and key of all filled tensors."""
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """Tensors that are copied from filled ones after the load: masters of loaded weights that the
    checkpoint does not have, and non-contiguous tensors from their contiguous copies."""

    def zero_padding(self) -> None:
        """Zero the vocabulary's padding rows that the checkpoint does not have."""
        for index in self.reads.padded:
            self.targets.zero(index)

    def finish(self) -> None:
        """Copy filled tensors into the others, in order."""
        with torch.no_grad():
            for tensor, filled in self.copies:
                tensor.copy_(filled)


def plan_load(
    request: LoadRequest,
    job: SavedJob,
    param_groups: list[dict[str, Any]],
    state_types: StateTypes,
    stored_words: int | None = None,
) -> LoadPlan:
    """Return the reads of this rank, after all ranks agree that they are possible. Collective.

    Without `strict`, missing state keeps its values, unexpected state is not read, and rank 0 logs
    both.

    Args:
        job: the ranks that saved the checkpoint.
        param_groups: the param groups of the checkpoint.
        state_types: the optimizer states to fill, merged from all ranks.
        stored_words: number of words of the saving job, as `vocabulary.least_words` returns it.

    Raises:
        MissingStateError: lists the differences of all ranks, on every rank; nothing was
            overwritten.
    """
    planner = _RankPlanner(request, job, stored_words)
    planned, findings = run_and_gather(lambda: planner.plan(param_groups, state_types))
    unexpected = _unexpected(planner, job, planned, findings)
    _raise_missing(request, job, findings, unexpected)
    raise_agreed([finding.refusal for finding in findings], planned.refusal)
    if this_rank() == 0:
        _log_lenience(job, findings, unexpected)
    assert planned.plan is not None
    return planned.plan


@dataclasses.dataclass(frozen=True)
class _RankPlan:
    """The plan of one rank, which other ranks do not see."""

    plan: LoadPlan | None
    names: Names
    """Kind and key of all tensors of this rank's model, read or derived from others."""
    refusal: Exception | None = None


@dataclasses.dataclass(frozen=True)
class _Findings:
    """Results of one rank's plan that all ranks gather; lists are limited by `shorten_list`."""

    differences: tuple[str, ...]
    sees_unexpected: bool
    """True if the shards that the rank checked hold tensors that its model does not have."""
    missing: tuple[str, ...]
    """Requested names that the checkpoint does not have."""
    refusal: ErrorReport | None = None
    """The reason, apart from differences, why the rank refuses the load."""
    frozen: tuple[str, ...] = ()
    """Stored optimizer state of parameters that do not train here, as `kind/key`."""
    changes: tuple[str, ...] = ()
    """Embeddings that lose rows of words or get new ones, and types of weights that change."""


class _RankPlanner:
    """Plans the reads of this rank. Nothing here communicates."""

    def __init__(self, request: LoadRequest, job: SavedJob, stored_words: int | None) -> None:
        self._request = request
        self._policy = request.policy
        self._stored_words = stored_words
        self._job = job
        # Copies belong to tensor ranks: after a change of their number no rank has its own copy.
        has_same_tensor_ranks = job.model_sizes[0] == parallel.model_sizes()[0]
        self._copies = job.copies if has_same_tensor_ranks else {}
        self._weights_alone = request.optimizer is None
        optimizer_kinds = set() if self._weights_alone else job.optimizer_kinds
        self._kinds = {WEIGHT, BUFFER} | optimizer_kinds

    def plan(
        self, param_groups: list[dict[str, Any]], state_types: StateTypes
    ) -> tuple[_RankPlan, _Findings]:
        """Return the plan of this rank, and the findings that all ranks gather.

        Raises:
            FlashCkptError: this rank cannot plan a load of any checkpoint.
        """
        wanted = self._under_stored_keys(self._request.pieces(self._job, state_types))
        requantized = self._request.requantized()
        pieces = self._as_stored(wanted)
        wanted_names = {(piece.kind, piece.key) for piece in pieces}
        names = wanted_names | requantized
        unused, missing = self._not_stored(wanted_names)
        sees_unexpected = self._sees_unexpected(names)
        missing_names = shorten_list(sorted({f"{kind}/{key}" for kind, key in missing}))
        omitted = unused if self._policy.strict else unused | missing
        skipped: list[LocalPiece] = []
        if omitted:
            is_kept = [(piece.kind, piece.key) not in omitted for piece in pieces]
            skipped = [local for local, kept in zip(wanted, is_kept, strict=True) if not kept]
            wanted = list(itertools.compress(wanted, is_kept))
            pieces = list(itertools.compress(pieces, is_kept))
        changes = self._resized(wanted)
        if changes and not self._policy.weights_only:
            lines = tuple(f"{line}; load with --finetune to accept that" for line in changes)
            return _RankPlan(None, names), _Findings(lines, sees_unexpected, missing_names)
        try:
            plan = self._reads(wanted, pieces, skipped)
        except MissingStateError as error:
            differences = shorten_list(error.differences)
            return _RankPlan(None, names), _Findings(differences, sees_unexpected, missing_names)
        changes = (*changes, *_converted(wanted, pieces))
        partly = {f"{pieces[n].kind}/{pieces[n].key} (in part)" for n in plan.reads.absent}
        missing_names = shorten_list(sorted({*missing_names, *partly}))
        checked = attempt(lambda: self._request.check(plan.names, param_groups, self._job.place))
        return (
            _RankPlan(plan, names, checked.error),
            _Findings(
                *((), sees_unexpected, missing_names, checked.report),
                frozen=self._frozen(),
                changes=changes,
            ),
        )

    def _resized(self, wanted: list[LocalPiece]) -> tuple[str, ...]:
        """Return one line for each embedding that would lose rows of words, or get new ones."""
        rows = {p.piece.key: p.piece.global_shape[0] for p in wanted if p.resizable}
        stored = {
            key: shape[0]
            for kind, key, _, shape in self._job.tensors
            if key in rows and not is_copy(kind)
        }
        return shorten_list(
            [
                f"{WEIGHT}/{key}: {resized(rows[key], stored[key])}"
                for key in sorted(stored)
                if loses_words(rows[key], stored[key], self._policy.words, self._stored_words)
            ]
        )

    def _under_stored_keys(self, wanted: list[LocalPiece]) -> list[LocalPiece]:
        """Return the pieces without those that are stored under another key of their tensor only.

        A tensor of several keys (`ModelGeometry.aliases`) has a piece for each of them.
        """
        aliases = self._request.geometry.aliases
        if not aliases:
            return wanted
        stored = {(local.piece.kind, local.piece.key) for local in wanted} & self._job.types.keys()

        def is_elsewhere(piece: Piece) -> bool:
            others = ((piece.kind, alias) for alias in aliases.get(piece.key, ()))
            return (piece.kind, piece.key) not in stored and not stored.isdisjoint(others)

        return [local for local in wanted if not is_elsewhere(local.piece)]

    def _as_stored(self, wanted: list[LocalPiece]) -> list[Piece]:
        """Return the stored pieces that fill `wanted`."""
        if not (self._job.derived_keys or self._copies or self._weights_alone):
            return [local.piece for local in wanted]
        return [self._one_as_stored(local) for local in wanted]

    def _one_as_stored(self, local: LocalPiece) -> Piece:
        """Return the stored piece that fills `local`.

        If a weight is not stored, return the master from which the weight is derived. Of a weight
        that is stored in another type of floats, a load of weights alone reads that type. If this
        rank's own copy is stored, return that copy.
        """
        piece, job = local.piece, self._job
        is_derived = piece.kind == WEIGHT and piece.key in job.derived_keys
        if is_derived and piece.dtype not in job.types.get((WEIGHT, piece.key), ()):
            piece = msgspec.structs.replace(piece, kind=MASTER, dtype="F32")
        elif self._weights_alone and piece.kind == WEIGHT:
            stored = job.type_of(WEIGHT, piece)
            if stored is not None and is_converted(stored, local.tensor):
                piece = msgspec.structs.replace(piece, dtype=stored)
        place = local.copy and self._copies.get((piece.key, local.copy.offset))
        return piece if place is None else as_copy(piece, place)

    def _not_stored(self, names: Names) -> tuple[Names, Names]:
        """Return the names that are not stored: first those that no forward uses, then the rest."""
        not_stored = names - self._job.types.keys()
        unused = {(kind, key) for kind, key in not_stored if key.endswith(UNUSED)}
        return unused, not_stored - unused

    def _sees_unexpected(self, names: Names) -> bool:
        """Return whether this rank's share of the shards has tensors that its model does not have.

        The ranks together check all shards. If the layout is unchanged, every rank checks its own
        shard.
        """
        shards = self._job.sources[this_rank() :: world_size()] if self._policy.fill else []
        return bool(unexpected_tensors(names, shards, self._kinds))

    def _frozen(self) -> tuple[str, ...]:
        """Return the stored optimizer state of parameters that do not train here.

        Layers may share a key, so the key alone does not tell.
        """
        kinds = self._kinds - {WEIGHT, BUFFER} if self._policy.fill else set()
        pieces = [
            msgspec.structs.replace(piece, kind=kind)
            for piece in (self._request.frozen() if kinds else ())
            for kind in kinds
            if (kind, piece.key) in self._job.types and not piece.key.endswith(UNUSED)
        ]
        names = stored_names(pieces, self._job.sources, self._job.place)
        return shorten_list(sorted(f"{kind}/{key}" for kind, key in names))

    def _reads(
        self, wanted: list[LocalPiece], pieces: list[Piece], skipped: list[LocalPiece]
    ) -> LoadPlan:
        """Return the plan that fills `wanted` from the stored `pieces`.

        Args:
            skipped: pieces that the checkpoint does not have.

        Raises:
            MissingStateError: lists the differences of this rank.
        """
        job = self._job
        saver = job.matching_rank(parallel.coordinates(), parallel.model_sizes())
        resizable = {n for n, local in enumerate(wanted) if local.resizable}
        held = job.pieces_of_rank(saver)
        lenient = not self._policy.strict
        reads = read_plan(pieces, job.sources, job.place, resizable, held, lenient=lenient)
        absent = set(reads.absent)
        skipped = [*skipped, *(wanted[index] for index in reads.absent)]
        loaded = [local for index, local in enumerate(wanted) if index not in absent]
        masters = list(_masters_of(loaded, skipped))
        filled = [*loaded, *(master for master, _ in masters)]
        names = {(local.piece.kind, local.piece.key) for local in filled}
        origins = {
            id(local.origin[1]): local.origin for local in filled if local.origin is not None
        }
        targets = Targets(pieces, [local.tensor for local in wanted])
        copies = [(master.tensor, weight) for master, weight in masters]
        return LoadPlan(reads, pieces, targets, names, (*copies, *origins.values()))

    def expects(self, name: tuple[str, str], names: Names) -> bool:
        """Return whether a stored tensor is among `names`, or no rank needs to read it."""
        kind, key = name
        is_read = self._policy.fill and kind in self._kinds and not key.endswith(UNUSED)
        return name in names or not is_read


def _converted(wanted: list[LocalPiece], pieces: list[Piece]) -> tuple[str, ...]:
    """Return one line for each type of weights that this load converts to another type."""
    types = {
        (piece.dtype, local.piece.dtype)
        for local, piece in zip(wanted, pieces, strict=True)
        if piece.kind == WEIGHT and piece.dtype != local.piece.dtype
    }
    return tuple(f"weights of type {stored} become {own}" for stored, own in sorted(types))


def _masters_of(
    weights: list[LocalPiece], skipped: list[LocalPiece]
) -> Iterator[tuple[LocalPiece, torch.Tensor]]:
    """Yield the masters among `skipped` whose weights are loaded, each with its part of the weight.

    Otherwise the next step of the optimizer would replace the loaded weight by its former master.
    """
    masters = [
        local
        for local in skipped
        # Bits that a weight lacks, as integers, are no master.
        if local.piece.kind in (MASTER, MASTER_STATE) and local.tensor.is_floating_point()
    ]
    if not masters:
        return
    by_box: dict[tuple[str, Shape, Shape], list[LocalPiece]] = defaultdict(list)
    for local in weights:
        if local.piece.kind == WEIGHT:
            by_box[local.piece.key, local.piece.offset, local.piece.shape].append(local)
    for local in masters:
        master = local.piece
        for weight in by_box[master.key, master.offset, master.shape]:
            start = weight.piece.start
            if start <= master.start and master.end <= weight.piece.end:
                yield local, weight.tensor[master.start - start : master.end - start]
                break


def _unexpected(
    planner: _RankPlanner, job: SavedJob, planned: _RankPlan, findings: list[_Findings]
) -> set[str]:
    """Return the stored tensors that no rank expects, as `kind/key`, in whole or in part."""
    whole = _wholly_unexpected(planner, job, planned, findings)
    frozen = {name for finding in findings for name in finding.frozen}
    return whole | {f"{name} (in part)" for name in frozen - whole}


def _wholly_unexpected(
    planner: _RankPlanner, job: SavedJob, planned: _RankPlan, findings: list[_Findings]
) -> set[str]:
    """Return the stored tensors of which no rank expects an element, as `kind/key`.

    Collective; costs nothing if no rank reports one. A tensor that one rank does not expect may
    belong to another rank, so every rank sends one flag for each stored name.
    """
    if not any(finding.sees_unexpected for finding in findings):
        return set()
    names = sorted(job.types)
    expected = reduce_largest([planner.expects(name, planned.names) for name in names])
    unexpected = itertools.compress(names, (not is_expected for is_expected in expected))
    return {f"{kind}/{key}" for kind, key in unexpected}


def _raise_missing(
    request: LoadRequest, job: SavedJob, findings: list[_Findings], unexpected: set[str]
) -> None:
    """Raise an error if a rank found differences that this load does not allow.

    Args:
        unexpected: stored tensors that no rank's model has, as `kind/key`.
    """
    lines = [line for finding in findings for line in finding.differences]
    differences = list(dict.fromkeys(lines))
    if (more := len(differences) - _MOST_DIFFERENCES) > 0:
        differences = [*differences[:_MOST_DIFFERENCES], f"... and {more} more on all ranks"]
    refused = unexpected if request.policy.refuses_unexpected else set()
    if differences or refused:
        flags = flags_as_stored(request.optimizer, job.types_by_kind())
        advice = f"Start with {' '.join(flags)}, as the run that saved it. " if flags else ""
        raise missing_state(job.place, differences, refused, advice)


def _log_lenience(job: SavedJob, findings: list[_Findings], unexpected: set[str]) -> None:
    for line in sorted(set().union(*(finding.changes for finding in findings))):
        logger.warning("%s: %s", job.place, line)
    missing = set().union(*(finding.missing for finding in findings))
    if missing or unexpected:
        logger.warning(
            "%s: missing state keeps its values: %s; unexpected state is not read: %s; missing "
            "masters are made from their weights if these are loaded",
            job.place,
            ", ".join(sorted(missing)) or "none",
            ", ".join(sorted(unexpected)) or "none",
        )
