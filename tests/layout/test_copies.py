"""Copies of a tensor: parts of one larger tensor, each of them complete."""

from __future__ import annotations

import pytest

from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.layout.completeness import incomplete
from megatron_flashckpt.layout.copies import CopyPlace, as_copy, is_copy, split
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import read_plan
from tests.support.worlds import sources_of

KINDS = ("weight", "master")


def layers(
    place: tuple[int, int] | None = None, kinds: tuple[str, ...] = KINDS, rows: int = 8
) -> list[Piece]:
    """Return both layers of a norm, or of the copy at `place`."""
    pieces = [
        Piece("norm", kind, "F32", (2, rows), (layer, 0), (1, rows), 0, rows)
        for kind in kinds
        for layer in range(2)
    ]
    if place is None:
        return pieces
    return [as_copy(piece, CopyPlace(place, (2, 4))) for piece in pieces]


def test_a_copy_is_a_part_of_a_larger_tensor() -> None:
    (piece, *_), (copy, *_) = layers(), layers((0, 3))
    assert copy == Piece("norm", "weight@", "F32", (2, 4, 2, 8), (0, 3, 0, 0), (1, 1, 1, 8), 0, 8)
    copy.check()
    assert (is_copy(copy.kind), is_copy(piece.kind)) == (True, False)
    assert split(copy) == (CopyPlace((0, 3), (2, 4)), piece)
    assert split(piece) == (None, piece)


def test_each_copy_must_be_complete_but_any_copy_may_be_missing() -> None:
    whole = layers((0, 1))
    assert incomplete(sources_of([layers(), whole, layers((0, 3))])) == []
    (problem,) = incomplete(sources_of([layers(), whole[1::2], layers((0, 3))]))
    assert problem.startswith("weight@/norm: the copy at (0, 1): at least 8 of 16 elements")
    (problem,) = incomplete(sources_of([layers(), whole, layers((0, 1), kinds=("weight",))]))
    assert "stored twice (ranks 1 and 2)" in problem
    # A save that derives weights from masters has copies of masters only.
    masters = layers(kinds=("master",)), layers((0, 1), kinds=("master",))
    assert incomplete(sources_of(list(masters))) == []


def test_rows_of_a_copy_may_be_fewer_or_more_than_stored() -> None:
    """A tied embedding's copy has a padded vocabulary, whose rows follow the axes of copies."""

    def embedding(rows: int) -> Piece:
        piece = Piece("words", "weight", "F32", (rows, 4), (0, 0), (rows, 4), 0, 4 * rows)
        return as_copy(piece, CopyPlace((1, 0), (2, 4)))

    sources = sources_of([[embedding(6)]])
    assert read_plan([embedding(8)], sources, "it", resizable=[0]).padded == (0,)
    assert read_plan([embedding(5)], sources, "it", resizable=[0]).padded == ()
    with pytest.raises(MissingStateError, match=r"weight@/words: \(2, 4, 6, 4\) F32 in the check"):
        read_plan([embedding(8)], sources, "it")
