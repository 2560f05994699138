"""Completeness of a checkpoint: every element of every tensor must be stored exactly once."""

from __future__ import annotations

import itertools
import math
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flashckpt.layout.completeness import incomplete
from megatron_flashckpt.layout.piece import Piece
from tests.support.strategies import in_layout_order, tilings
from tests.support.worlds import source, sources_of


def problems(*ranks: list[Piece]) -> list[str]:
    return incomplete(sources_of(list(map(in_layout_order, ranks))))


def part(
    offset: tuple[int, ...], shape: tuple[int, ...], start: int = 0, end: int | None = None
) -> Piece:
    end = math.prod(shape) if end is None else end
    return Piece("w", "weight", "U8", (4, 6), offset, shape, start, end)


WHOLE = [part((0, 0), (2, 6)), part((2, 0), (2, 4), 0, 3), part((2, 0), (2, 4), 3, 8)]
LAST = part((2, 4), (2, 2))
TWICE = "elements 0-3 are stored twice (ranks 1 and 1)"


@st.composite
def tiled(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Piece]]:
    """Draw a tensor that is cut into boxes, and each box into ranges."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    pieces = []
    for offset, extent in draw(tilings(shape)):
        volume = math.prod(extent)
        cuts = sorted(draw(st.lists(st.integers(0, volume), max_size=2)))
        for start, end in itertools.pairwise([0, *cuts, volume]):
            pieces.append(Piece("w", "weight", "U8", shape, offset, extent, start, end))
    return shape, draw(st.permutations(pieces))


@given(tiled(), st.data())
def test_incomplete_agrees_with_a_count_of_the_elements(tiling, data):
    shape, pieces = tiling
    index = data.draw(st.integers(0, len(pieces) - 1))
    axis = data.draw(st.integers(0, len(shape) - 1)) if shape else None
    if axis is not None:  # move one piece along an axis
        victim = pieces[index]
        offset = list(victim.offset)
        offset[axis] = data.draw(st.integers(0, shape[axis] - victim.shape[axis]))
        pieces = [*pieces]
        pieces[index] = msgspec.structs.replace(victim, offset=tuple(offset))
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for piece in pieces:
        region = [range(low, low + n) for low, n in zip(piece.offset, piece.shape, strict=True)]
        for element in list(itertools.product(*region))[piece.start : piece.end]:
            counts[element] += 1
    assert (problems(pieces) == []) == (set(counts.values()) <= {1})


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([*WHOLE], "at least 4 of 24 elements are in no box"),
        ([*WHOLE, LAST, LAST], "box at (2, 4) of shape (2, 2): elements 0-3 are stored twice"),
        ([*WHOLE, part((2, 4), (2, 2), 0, 3)], "elements 3-3 are missing"),
        ([*WHOLE, part((2, 4), (2, 2), 1)], "elements 0-0 are missing"),
        ([*WHOLE, LAST, part((2, 0), (2, 4), 2, 4)], "elements 2-2 are stored twice"),
        ([*WHOLE, part((2, 3), (2, 3))], "boxes overlap: they hold 26 elements"),
        ([*WHOLE, part((2, 3), (2, 2))], "boxes overlap: they hold 24 elements"),
        (
            [*WHOLE, msgspec.structs.replace(LAST, global_shape=(4, 7))],
            "ranks disagree about its global shape: (4, 6), (4, 7)",
        ),
        (
            [*WHOLE[:2], msgspec.structs.replace(WHOLE[2], dtype="F16"), LAST],
            "box at (2, 0) of shape (2, 4): ranks disagree about its type: F16, U8",
        ),
        (
            [*WHOLE, LAST, msgspec.structs.replace(LAST, dtype="F16")],
            "box at (2, 4) of shape (2, 2): ranks disagree about its type: F16, U8",
        ),
    ],
)
def test_the_message_names_the_fault_of_the_tensor(pieces, message):
    (problem,) = problems(pieces)
    assert problem.startswith("weight/w: ")
    assert message in problem


def typed(pieces: list[Piece], dtype: str = "U8", kind: str = "weight") -> list[Piece]:
    return [msgspec.structs.replace(piece, kind=kind, dtype=dtype) for piece in pieces]


@given(tiled(), st.data(), st.integers(1, 4))
def test_any_tiling_is_complete_until_a_piece_is_lost_or_doubled(tiling, data, ranks):
    """Boxes of one tensor may differ in type."""
    _, pieces = tiling
    types = {
        box: data.draw(st.sampled_from(["F32", "BF16", "U8"]))
        for box in sorted({(piece.offset, piece.shape) for piece in pieces})
    }
    mixed = [
        msgspec.structs.replace(piece, dtype=types[piece.offset, piece.shape]) for piece in pieces
    ]
    assert problems(*(mixed[rank::ranks] for rank in range(ranks))) == []
    victim = data.draw(st.sampled_from([piece for piece in mixed if piece.numel]))
    others = [piece for piece in mixed if piece is not victim]
    (lost,) = problems(others, [msgspec.structs.replace(victim, end=victim.start)])
    assert lost.startswith("weight/w: ")
    (doubled,) = problems(mixed, [], [victim])
    assert doubled.startswith("weight/w: ")
    assert doubled.endswith("twice (ranks 0 and 2)")


LAYERS = [part((layer, 0), (1, 6)) for layer in range(4)]


def test_masters_stand_in_for_the_16_bit_layers_of_a_mixed_key():
    weight = typed(LAYERS[:1], "F32")
    masters = typed(LAYERS[1:], "F32", "master")
    moments = typed(LAYERS, "F32", "exp_avg")
    assert problems(weight, masters, moments) == []
    assert problems(weight, masters, moments[1:]) == [], "without moments, layer 0 is frozen"
    assert problems(weight, masters[1:], moments) == [
        "master/w: at least 12 of 24 elements are in no box",
        "weight/w: at least 18 of 24 elements are in no box",
    ]
    # A save without 16-bit weights would also omit this one.
    sixteen = typed(LAYERS[:1], "BF16")
    assert "weight/w: at least 18 of 24 elements are in no box" in problems(sixteen, masters)


@pytest.mark.parametrize(
    ("weight", "kind", "state", "lines"),
    [
        ([*WHOLE, LAST], "exp_avg", [LAST], []),
        (
            [*WHOLE, LAST],
            "exp_avg",
            [part((2, 4), (2, 2), 1)],
            ["exp_avg/w: box at (2, 4) of shape (2, 2): elements 0-0 are missing"],
        ),
        (
            [*WHOLE, LAST],
            "exp_avg",
            [LAST, LAST],
            [f"exp_avg/w: box at (2, 4) of shape (2, 2): {TWICE}"],
        ),
        (
            [*WHOLE, LAST],
            "exp_avg",
            [part((2, 3), (2, 2))],
            ["exp_avg/w: at least 20 of 24 elements are in no box"],
        ),
        ([], "master", [*WHOLE, LAST], []),
        ([], "master", WHOLE, ["master/w: at least 4 of 24 elements are in no box"]),
        (
            WHOLE,
            "master",
            [*WHOLE, LAST],
            ["weight/w: at least 4 of 24 elements are in no box"],
        ),
    ],
)
def test_optimizer_state_may_lack_only_whole_boxes_that_its_weight_has(weight, kind, state, lines):
    assert problems(weight, typed(state, kind=kind)) == lines


def test_states_of_ranks_may_differ_in_size():
    def state(rank: int, nbytes: int) -> Piece:
        shape = (2, nbytes)
        return Piece("rank_state", "rank_state", "U8", shape, (rank, 0), (1, nbytes), 0, nbytes)

    assert problems([state(0, 16)], [state(1, 32)]) == []
    (problem,) = problems([state(0, 16)], [msgspec.structs.replace(state(1, 32), end=31)])
    assert problem == "rank_state/rank_state: box at (1, 0) of shape (1, 32): elements 31-31 " + (
        "are missing"
    )


def test_a_piece_outside_its_tensor_is_named_with_its_rank():
    sound = source(5, in_layout_order([*WHOLE, LAST]))
    moved = (9, *sound.placement[1:])
    outside, left = incomplete([sound._replace(placement=moved)])
    assert outside.startswith("rank 5: ")
    assert "leaves the global shape (4, 6)" in outside
    assert left == "weight/w: at least 12 of 24 elements are in no box"


def test_tensors_without_elements_are_complete():
    nothing = Piece("w", "weight", "U8", (0, 3), (0, 0), (0, 3), 0, 0)
    scalar = Piece("s", "weight", "F32", (), (), (), 0, 1)
    assert problems([nothing, scalar]) == []
    (problem,) = problems([msgspec.structs.replace(scalar, end=0)])
    assert problem == "weight/s: at least 1 of 1 elements are in no box"


def test_large_tensors_are_checked_without_visiting_all_corners_or_comparing_pairs():
    many_axes = [Piece("w", "weight", "U8", (2,) * 60, (0,) * 60, (1,) * 60, 0, 1)]
    layers, experts = 20, 250
    shape = (layers, experts, 2, 2)
    pieces = [
        Piece("experts", "weight", "U8", shape, (layer, expert, half, 0), (1, 1, 1, 2), 0, 2)
        for layer, expert, half in itertools.product(range(layers), range(experts), range(2))
    ]
    started = time.monotonic()
    assert problems(many_axes) == ["weight/w: is sharded along 60 axes; at most 10 are supported"]
    assert problems(pieces) == []
    assert problems(pieces[:-1]) == ["weight/experts: at least 2 of 20000 elements are in no box"]
    # Comparing pairs would take 10**8 comparisons; the check visits 10**5 corners.
    assert time.monotonic() - started < 10
