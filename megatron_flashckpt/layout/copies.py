"""Copies of a tensor that several ranks hold, and whether they are equal.

Tensor ranks hold norm weights, routers and the like alike, pipeline stages a tied embedding. One of
them writes its copy: the *main* one. Training can let the others drift apart, if nothing reduces
their gradients. Ranks cannot compare bytes in a save, which communicates nothing. So each sums up
what it holds, and the agent that commits compares the sums.

Data-parallel replicas may cut each copy in another way. So a sum is one that adds up
(`copy_sums.weighed`): over all ranks the sums of two copies are equal if the copies are, and differ
if not, but for one chance in about 2**64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from megatron_flashckpt.layout.piece import Piece

#: Elements of a box that are summed up, from its beginning: enough to see that gradients differ,
#: and few enough to cost nothing where a copy is a whole embedding.
COMPARED_NUMEL = 2**20

_MARK = "@"
_SUM_NBYTES = 8
_MASK = 2 ** (8 * _SUM_NBYTES) - 1


class CopySum(msgspec.Struct, frozen=True, array_like=True):
    """Sum of what one rank has of one copy of a tensor."""

    key: str
    kind: str
    copy: str
    """Where the copy stands among the copies (`Geometry.copy`); empty: the main one."""
    numel: int
    total: bytes
    """Always of the same length, so that a slot has room for sums before they are known."""


def copy_kind(kind: str, copy: str) -> str:
    """Return the kind under which a copy that is not the main one is saved."""
    return f"{kind}{_MARK}{copy}" if copy else kind


def is_copy(kind: str) -> bool:
    """Return whether pieces of `kind` are of a copy that is not the main one."""
    return _MARK in kind


def split_kind(kind: str) -> tuple[str, str]:
    """Return the kind of the main copy, and which copy `kind` stands for (empty: the main one)."""
    plain, _, copy = kind.partition(_MARK)
    return plain, copy


def compared_numel(piece: Piece) -> int:
    """Return how many elements of `piece`, from its start, are compared."""
    return max(min(piece.end, COMPARED_NUMEL) - piece.start, 0)


def added_up(parts: Iterable[tuple[Piece, int]]) -> tuple[CopySum, ...]:
    """Return the sums of one rank, of pieces and what `weighed` returned for them."""
    found: dict[tuple[str, str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for piece, total in parts:
        name = (piece.key, *split_kind(piece.kind))
        numel, before = found[name]
        found[name] = numel + compared_numel(piece), before + total & _MASK
    return tuple(
        CopySum(*name, numel, total.to_bytes(_SUM_NBYTES, "little"))
        for name, (numel, total) in found.items()
    )


class _Report(Protocol):
    @property
    def differing(self) -> tuple[str, ...]: ...

    @property
    def sums(self) -> tuple[CopySum, ...] | None: ...


def compared(of_ranks: Sequence[_Report]) -> tuple[frozenset[str], bool]:
    """Return the keys of tensors whose copies differ, and whether copies were compared just now.

    They are if all ranks have summed up theirs; what was known to differ still does.
    """
    known = frozenset(key for it in of_ranks for key in it.differing)
    sums = [it.sums for it in of_ranks if it.sums is not None]
    if len(sums) < len(of_ranks):
        return known, False
    return known | differing_keys(sums), True


def differing_keys(of_ranks: Iterable[Iterable[CopySum]]) -> frozenset[str]:
    """Return the keys of which a copy differs from the main one, by the sums of all ranks.

    A copy that several ranks stand for counts so many times. One that is there only in part says
    nothing.
    """
    found: dict[tuple[str, str], dict[str, tuple[int, int]]]
    found = defaultdict(lambda: defaultdict(lambda: (0, 0)))
    for it in (it for of_rank in of_ranks for it in of_rank):
        copies = found[it.key, it.kind]
        numel, total = copies[it.copy]
        copies[it.copy] = numel + it.numel, total + int.from_bytes(it.total, "little") & _MASK
    return frozenset(
        key
        for (key, _), copies in found.items()
        if any(not _may_equal(copies.get("", (0, 0)), copy) for copy in copies.values())
    )


def _may_equal(main: tuple[int, int], copy: tuple[int, int]) -> bool:
    """Return whether `copy`, its elements and their sum, may be the main copy several times."""
    times, rest = divmod(copy[0], main[0]) if main[0] else (0, 1)
    return rest != 0 or copy[1] == (times * main[1]) & _MASK
