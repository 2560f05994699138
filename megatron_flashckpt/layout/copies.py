"""Copies of one tensor on several ranks, and the check that the copies are equal.

Tensor-parallel ranks each hold a copy of norm weights and routers; pipeline stages each hold a copy
of a tied embedding. One rank writes its copy, the *main* copy. Copies drift apart in training if
their gradients are not reduced. A save has no communication, so each rank computes a sum of its
copy, and the committing agent compares the sums.

Data-parallel replicas may shard the copies differently, so the sum is additive
(`copy_sums.weighted_sum`). The total sums of equal copies are equal; those of different copies
agree by chance only once in about 2**64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from megatron_flashckpt.layout.piece import Piece

#: Number of elements, from the start of a box, that enter its sum. It is large enough to notice
#: different gradients, and small enough to be cheap for an embedding.
COMPARED_NUMEL = 2**20

_MARK = "@"
_SUM_NBYTES = 8
_MASK = 2 ** (8 * _SUM_NBYTES) - 1


class CopySum(msgspec.Struct, frozen=True, array_like=True):
    """Sum of one rank's elements of one copy of a tensor."""

    key: str
    kind: str
    copy: str
    """Position of the copy (`Geometry.copy`); empty for the main copy."""
    numel: int
    total: bytes
    """Fixed length, so that a slot can reserve room before the sum is known."""


def copy_kind(kind: str, copy: str) -> str:
    """Return the kind under which `copy` is saved; `kind` itself for the main copy."""
    return f"{kind}{_MARK}{copy}" if copy else kind


def is_copy(kind: str) -> bool:
    """Return whether `kind` marks a copy other than the main copy."""
    return _MARK in kind


def split_kind(kind: str) -> tuple[str, str]:
    """Return the kind of the main copy, and the position of the copy (empty for the main copy)."""
    plain, _, copy = kind.partition(_MARK)
    return plain, copy


def compared_numel(piece: Piece) -> int:
    """Return the number of elements, from the start of `piece`, that enter its sum."""
    return max(min(piece.end, COMPARED_NUMEL) - piece.start, 0)


def added_up(parts: Iterable[tuple[Piece, int]]) -> tuple[CopySum, ...]:
    """Return one rank's sums, from its pieces and their results of `weighted_sum`."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for piece, total in parts:
        name = (piece.key, *split_kind(piece.kind))
        numel, before = sums[name]
        sums[name] = numel + compared_numel(piece), before + total & _MASK
    return tuple(
        CopySum(*name, numel, total.to_bytes(_SUM_NBYTES, "little"))
        for name, (numel, total) in sums.items()
    )


class _Report(Protocol):
    @property
    def differing(self) -> tuple[str, ...]: ...

    @property
    def sums(self) -> tuple[CopySum, ...] | None: ...


def compared(of_ranks: Sequence[_Report]) -> tuple[frozenset[str], bool]:
    """Return the keys of tensors whose copies differ, and whether this call compared copies.

    Copies are compared if every rank reported its sums. Keys already known to differ stay.
    """
    known = frozenset(key for report in of_ranks for key in report.differing)
    sums = [report.sums for report in of_ranks if report.sums is not None]
    if len(sums) < len(of_ranks):
        return known, False
    return known | differing_keys(sums), True


def differing_keys(of_ranks: Iterable[Iterable[CopySum]]) -> frozenset[str]:
    """Return the keys of tensors of which a copy differs from the main copy, by all ranks' sums.

    If several ranks report the same copy, its sum is a multiple. An incomplete copy is ignored.
    """
    tensors: dict[tuple[str, str], dict[str, tuple[int, int]]]
    tensors = defaultdict(lambda: defaultdict(lambda: (0, 0)))
    for part in (part for of_rank in of_ranks for part in of_rank):
        copies = tensors[part.key, part.kind]
        numel, total = copies[part.copy]
        copies[part.copy] = numel + part.numel, total + int.from_bytes(part.total, "little") & _MASK
    return frozenset(
        key
        for (key, _), copies in tensors.items()
        if any(not _may_equal(copies.get("", (0, 0)), copy) for copy in copies.values())
    )


def _may_equal(main: tuple[int, int], copy: tuple[int, int]) -> bool:
    """Return whether `copy` (elements, sum) can be a multiple of `main`."""
    times, rest = divmod(copy[0], main[0]) if main[0] else (0, 1)
    return rest != 0 or copy[1] == (times * main[1]) & _MASK
