"""Copies of tensors in a saved job: only complete copies count."""

from __future__ import annotations

from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.copies import copy_kind
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.load.source_job import SavedJob
from tests.support.worlds import sources_of

KINDS = ("weight", "master")


def parts(layer: int, start: int, end: int, kinds: tuple[str, ...] = KINDS) -> list[Piece]:
    return [Piece("norm", kind, "F32", (2, 8), (layer, 0), (1, 8), start, end) for kind in kinds]


def copies_of(*ranks: list[Piece]) -> frozenset[tuple[str, str]]:
    return SavedJob("here", sources_of(ranks), [Coordinates() for _ in ranks]).copies


def own(layer: int, start: int, end: int, copy: str = "0.1", kinds: tuple[str, ...] = KINDS):
    return parts(layer, start, end, tuple(copy_kind(kind, copy) for kind in kinds))


MAIN = parts(0, 0, 8) + parts(1, 0, 8)


def test_complete_copies_count() -> None:
    assert copies_of(MAIN) == frozenset()
    assert copies_of(MAIN, own(0, 0, 8) + own(1, 0, 5), own(1, 5, 8)) == {("norm", "0.1")}


def test_partial_copies_do_not_count() -> None:
    """A node stores a partial copy if it learns one save late that copies differ."""
    assert copies_of(MAIN, own(0, 0, 8) + own(1, 0, 5)) == frozenset()
    assert copies_of(MAIN, own(0, 0, 8) + own(1, 0, 8, kinds=("weight",))) == frozenset()
    whole = own(0, 0, 8, "0.2") + own(1, 0, 8, "0.2")
    assert copies_of(MAIN, own(0, 0, 8), whole) == {("norm", "0.2")}
    assert copies_of(MAIN, own(0, 0, 8) + own(0, 0, 8) + own(1, 0, 8)) == frozenset()
