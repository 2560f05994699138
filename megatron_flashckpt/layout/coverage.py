"""Which stored bytes fill which wanted pieces, checked before anything is overwritten.

Here a wanted piece is filled from stored pieces of the same box: the same tensor, pipeline and
expert layout. The data-parallel cut (which rank wrote which range) may differ freely.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.plan import Placement, Template


class Read(NamedTuple):
    """`nbytes` from `source_offset` of a data section to `target_offset` of a wanted piece."""

    source_offset: int
    nbytes: int
    wanted: int
    target_offset: int


class Source(NamedTuple):
    """One rank's stored layout."""

    rank: int
    template: Template
    placement: Placement


def read_plan(
    wanted: list[Piece], sources: Iterable[Source], place: str, unwanted: Iterable[str] = ()
) -> dict[int, list[Read]]:
    """Return, per source rank, the reads that fill `wanted`; every element exactly once.

    Args:
        place: the checkpoint's name, for the message.
        unwanted: names that no rank's model has (see `superfluous`); they are differences too.

    Raises:
        MissingStateError: one message with every key that is absent, superfluous, of another shape
            or type, cut otherwise, or only partly there.
    """
    boxes = {piece.box for piece in wanted}
    stored: dict[tuple[str, str, tuple[int, ...], tuple[int, ...]], list[_Stored]] = defaultdict(
        list
    )
    known: dict[tuple[str, str], set[tuple[tuple[int, ...], str]]] = defaultdict(set)
    for source in sources:
        for item, there in zip(source.template.items, source.placement, strict=True):
            known[item.kind, item.key].add((item.global_shape, item.dtype))
            box = (item.key, item.kind, there.offset, item.shape)
            if box in boxes:
                run = _Stored(there.start, item.numel, item.byte_offset, source.rank, item.dtype)
                stored[box].append(run)
    plan: dict[int, list[Read]] = defaultdict(list)
    problems = {f"{name}: in the checkpoint, not in the model": None for name in sorted(unwanted)}
    for index, piece in enumerate(wanted):
        reads = _fill(index, piece, stored.get(piece.box, []))
        if reads is None or (piece.global_shape, piece.dtype) not in known[piece.kind, piece.key]:
            problems[_problem(piece, known[piece.kind, piece.key], piece.box in stored)] = None
            continue
        for rank, read in reads:
            plan[rank].append(read)
    if problems:
        raise MissingStateError(
            f"{place} does not hold what this model needs ({len(problems)} differences):\n  "
            + "\n  ".join(problems)
            + "\nUse the model settings and the TP, PP, VPP and EP sizes of the run that saved it, "
            "or --ckpt-step for another iteration; nothing was loaded"
        )
    return dict(plan)


def superfluous(wanted: list[Piece], sources: Iterable[Source], kinds: set[str]) -> set[str]:
    """Return `kind/key` of all that is stored (of `kinds`) but not wanted here."""
    mine = {(piece.kind, piece.key) for piece in wanted}
    return {
        f"{item.kind}/{item.key}"
        for source in sources
        for item in source.template.items
        if item.kind in kinds and (item.kind, item.key) not in mine
    }


class _Stored(NamedTuple):
    start: int
    numel: int
    byte_offset: int
    rank: int
    dtype: str


def _fill(index: int, piece: Piece, runs: list[_Stored]) -> list[tuple[int, Read]] | None:
    """Return the reads for `piece`, or None if `runs` do not hold each element exactly once."""
    size = itemsize(piece.dtype)
    position = piece.start
    reads = []
    for run in sorted(runs):
        low, high = max(run.start, piece.start), min(run.start + run.numel, piece.end)
        if low >= high:
            continue
        if low != position or run.dtype != piece.dtype:
            return None
        source_offset = run.byte_offset + (low - run.start) * size
        reads.append(
            (
                run.rank,
                Read(source_offset, (high - low) * size, index, (low - piece.start) * size),
            )
        )
        position = high
    return reads if position == piece.end else None


def _problem(piece: Piece, known: set[tuple[tuple[int, ...], str]], same_box: bool) -> str:
    name = f"{piece.kind}/{piece.key}"
    if not known:
        return f"{name}: not in the checkpoint; the model has shape {piece.global_shape}"
    if (piece.global_shape, piece.dtype) not in known:
        found = ", ".join(f"{shape} {dtype}" for shape, dtype in sorted(known))
        return f"{name}: {found} in the checkpoint, {piece.global_shape} {piece.dtype} in the model"
    if not same_box:
        return f"{name}: cut otherwise by tensor, pipeline or expert parallelism"
    return f"{name}: elements {piece.start} to {piece.end} are not there exactly once"
