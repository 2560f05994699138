"""Read plans: they fill every wanted element exactly once from any shards, or fail with one error.

The error names everything that cannot be filled. The tests compare with a brute-force copy of
global numpy tensors, element by element.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt.errors import CorruptCheckpointError, MissingStateError
from megatron_flashckpt.layout import stored_index
from megatron_flashckpt.layout.exact_match import (
    NOTHING_STORED,
    StoredPieces,
    pieces_stored_once,
    stored_tensors,
)
from megatron_flashckpt.layout.piece import Piece, Shape
from megatron_flashckpt.layout.read_plan import (
    Read,
    ReadPlan,
    missing_state,
    read_plan,
    unexpected_tensors,
)
from megatron_flashckpt.layout.reshard import Run
from megatron_flashckpt.layout.template import Source
from tests.support.strategies import dtypes, in_layout_order, kinds, tilings
from tests.support.worlds import (
    Tensors,
    carry_out,
    content,
    files_of,
    random_tensor,
    run,
    source,
    sources_of,
    whole,
)

PLACE = "/ckpt/iter_0000007"
#: Context in which all runs are compared as arrays, as those of many ranks are.
as_arrays = functools.partial(mock.patch.multiple, stored_index, _FEW_USERS=0, _FEW_ROWS=0)


def assert_filled(
    tensors: Tensors,
    ranks: Sequence[list[Piece]],
    wanted: list[Piece],
    resizable: Sequence[int] = (),
) -> ReadPlan:
    """Assert that the plan for `wanted` reads exactly the right bytes, each element once."""
    plan = read_plan(wanted, sources_of(ranks), PLACE, resizable=resizable)
    filled, times = carry_out(plan, wanted, files_of(tensors, ranks))
    assert filled == [content(tensors, piece) for piece in wanted]
    for index, (piece, count) in enumerate(zip(wanted, times, strict=True)):
        assert count.max(initial=0) <= 1
        # The plan lists the pieces that stay zero.
        assert (count.sum() < piece.numel) == (index in plan.padded)
    with as_arrays():
        assert read_plan(wanted, sources_of(ranks), PLACE, resizable=resizable) == plan
    return plan


def held_by_each(sources: list[Source]) -> list[StoredPieces]:
    tensors = stored_tensors(sources)
    return [pieces_stored_once(stored, tensors) for stored in sources]


def problems(
    wanted: list[Piece],
    stored: Sequence[list[Piece]],
    unexpected: tuple[str, ...] = (),
    resizable: Sequence[int] = (),
) -> list[str]:
    sources = sources_of(stored)
    with pytest.raises(MissingStateError) as caught:
        read_plan(wanted, sources, PLACE, resizable)
    same = f"^{re.escape(str(caught.value))}$"
    for held in held_by_each(sources):  # the shortcut hides no difference
        with pytest.raises(MissingStateError, match=same):
            read_plan(wanted, sources, PLACE, resizable, held)
    with as_arrays(), pytest.raises(MissingStateError, match=same):
        read_plan(wanted, sources, PLACE, resizable)
    error = (
        missing_state(PLACE, caught.value.differences, unexpected) if unexpected else caught.value
    )
    head, *lines, remedy = str(error).splitlines()
    count = "1 difference" if len(lines) == 1 else f"{len(lines)} differences"
    assert head == f"{PLACE} does not fit this model ({count}):"
    assert "nothing was loaded" in remedy
    return [line.strip() for line in lines]


def box(key: str, numel: int = 8, kind: str = "weight", dtype: str = "F32") -> Piece:
    return whole(key, kind, dtype, (numel,), (0,), (numel,))


def matrix(offset: Shape, shape: Shape, global_shape: Shape = (4, 6)) -> Piece:
    return whole("w", "weight", "F32", global_shape, offset, shape)


# ---------------------------------------------------------------------- any cut into any other


@st.composite
def tensors_drawn(draw: st.DrawFn) -> tuple[Tensors, list[Piece]]:
    """Draw global tensors, some empty or scalar, and a piece of each whole tensor."""
    tensors, wholes = {}, []
    names = st.tuples(kinds, st.sampled_from("abc"))
    for kind, key in draw(st.lists(names, unique=True, min_size=1, max_size=3)):
        dtype = draw(dtypes)
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        tensors[kind, key] = random_tensor(shape, dtype, draw(st.integers(0, 9)))
        wholes.append(whole(key, kind, dtype, shape, (0,) * len(shape), shape))
    return tensors, wholes


@st.composite
def cuts(draw: st.DrawFn, wholes: list[Piece], ranks: int) -> list[list[Piece]]:
    """Draw shards of `wholes`: boxes of tensors, ranges of boxes, each range on one rank."""
    by_rank: list[list[Piece]] = [[] for _ in range(ranks)]
    for piece in wholes:
        for offset, shape in draw(tilings(piece.global_shape)):
            part = whole(piece.key, piece.kind, piece.dtype, piece.global_shape, offset, shape)
            points = st.lists(st.integers(0, part.end), min_size=ranks - 1, max_size=ranks - 1)
            ends = [*sorted(draw(points)), part.end]
            order = draw(st.permutations(range(ranks)))
            for rank, start, end in zip(order, [0, *ends[:-1]], ends, strict=True):
                # A rank without elements of a tensor has an empty piece or none.
                if start < end or not part.numel or draw(st.booleans()):
                    by_rank[rank].append(run(part, start, end))
    return [in_layout_order(pieces) for pieces in by_rank]


@settings(max_examples=100, deadline=None)
@given(st.data(), tensors_drawn(), st.integers(1, 4), st.integers(1, 3))
def test_any_shards_can_be_read_as_any_other_shards(data, drawn, saved_by, loaded_by):
    """The shortcut for pieces of the rank at the same coordinates gives the same plan."""
    tensors, wholes = drawn
    stored = data.draw(cuts(wholes, saved_by))
    sources = sources_of(stored)
    for wanted in [*stored, *data.draw(cuts(wholes, loaded_by))]:
        plan = assert_filled(tensors, stored, wanted)
        for held in held_by_each(sources):
            assert read_plan(wanted, sources, PLACE, held=held) == plan


def test_a_plan_names_the_source_bytes_and_their_elements():
    weight = box("w")
    stored = [[box("other", 2), run(weight, 0, 5)], [run(weight, 5, 8)]]
    wanted = [box("other", 2), run(weight, 3, 7)]
    assert read_plan(wanted, sources_of(stored), PLACE).reads == {
        0: [Read(0, 8, 0, Run((0,), (2,), 0, 2)), Read(8 + 12, 8, 1, Run((0,), (8,), 3, 5))],
        1: [Read(0, 8, 1, Run((0,), (8,), 5, 7))],
    }


def test_columns_are_read_from_the_first_to_the_last_wanted_element():
    plan = read_plan([matrix((1, 2), (2, 2))], sources_of([[matrix((0, 0), (4, 6))]]), PLACE)
    # From row 1, column 2 to row 2, column 3.
    assert plan.reads == {0: [Read(4 * 8, 4 * 8, 0, Run((0, 0), (4, 6), 8, 16))]}


def test_reads_follow_the_order_of_the_file():
    stored = [[box("a"), box("b"), box("c")]]
    plan = read_plan([box("c"), box("a"), box("b")], sources_of(stored), PLACE)
    assert [read.wanted for read in plan.reads[0]] == [1, 2, 0]


# ---------------------------------------------------------------------- padded vocabulary


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3))
def test_other_vocabulary_padding_is_cut_off_or_filled_with_zeros(
    data, stored_rows, wanted_rows, saved_by, loaded_by
):
    """Megatron's `allow_shape_mismatch` also writes zeros first, then the common elements."""
    tensors: Tensors = {("weight", "w"): random_tensor((stored_rows, 2), "F32", 0)}
    stored = data.draw(cuts([matrix((0, 0), (stored_rows, 2), (stored_rows, 2))], saved_by))
    for wanted in data.draw(cuts([matrix((0, 0), (wanted_rows, 2), (wanted_rows, 2))], loaded_by)):
        assert_filled(tensors, stored, wanted, resizable=range(len(wanted)))


# ---------------------------------------------------------------------- differences

BOX = box("w")
LAYERS = [whole("w", "weight", "F32", (4, 2), (n, 0), (1, 2)) for n in range(4)]


def layer(number: int, dtype: str, layers: int = 1) -> Piece:
    return whole("w", "weight", dtype, (4, 8), (number, 0), (layers, 8))


@pytest.mark.parametrize(
    ("stored", "resizable", "line"),
    [
        (matrix((0, 0), (4, 6)), [], "(4, 6) F32 in the checkpoint, (5, 6) F32 in the model"),
        (box("w", 4), [0], "(4,) F32 in the checkpoint, (5, 6) F32 in the model"),
        (
            whole("w", "weight", "BF16", (4, 6), (0, 0), (4, 6)),
            [0],
            "(4, 6) BF16 in the checkpoint, (5, 6) F32 in the model",
        ),
        (
            run(matrix((0, 0), (4, 6)), 0, 23),
            [0],
            "elements 0 to 30 of the box at (0, 0) are not stored exactly once",
        ),
    ],
    ids=["not resizable", "other axes", "other type", "gap"],
)
def test_only_rows_of_resizable_pieces_may_be_missing(stored, resizable, line):
    wanted = [matrix((0, 0), (5, 6), (5, 6))]
    assert problems(wanted, [[stored]], resizable=resizable) == [f"weight/w: {line}"]


@pytest.mark.parametrize(
    ("wanted", "stored", "line"),
    [
        (
            whole("w", "weight", "F32", (0, 3), (0, 0), (0, 3)),
            [box("v")],
            "not in the checkpoint; the model has shape (0, 3)",
        ),
        (BOX, [box("w", kind="master")], "not in the checkpoint; the model has shape (8,)"),
        (LAYERS[2], LAYERS[:2], "elements 0 to 2 of the box at (2, 0) are not in the checkpoint"),
        # One rank may hold the whole tensor, and another contradicts it.
        (BOX, [BOX, box("w", 9)], "(8,) F32, (9,) F32 in the checkpoint, (8,) F32 in the model"),
        (
            run(BOX, 0, 4),
            [run(BOX, 0, 4), run(box("w", 9), 4, 8)],
            "(8,) F32, (9,) F32 in the checkpoint, (8,) F32 in the model",
        ),
        (
            BOX,
            [run(BOX, 0, 0), matrix((0, 0), (4, 6))],
            "(4, 6) F32, (8,) F32 in the checkpoint, (8,) F32 in the model",
        ),
        (
            BOX,
            [BOX, run(box("w", dtype="BF16"), 4, 8)],
            "elements 0 to 8 of the box at (0,) are BF16, F32 in the checkpoint, F32 in the model",
        ),
        (
            layer(1, "BF16"),
            [layer(0, "BF16"), layer(1, "F32")],
            "elements 0 to 8 of the box at (1, 0) are F32 in the checkpoint, BF16 in the model",
        ),
        (
            layer(0, "BF16", 2),
            [layer(0, "F32"), layer(1, "BF16")],
            "elements 0 to 16 of the box at (0, 0) are BF16, F32 in the checkpoint, BF16 in the "
            "model",
        ),
    ],
)
def test_state_of_another_shape_or_type_and_missing_state_is_named(wanted, stored, line):
    assert problems([wanted], [[piece] for piece in stored]) == [f"{wanted.kind}/w: {line}"]


@pytest.mark.parametrize(
    "stored",
    [
        [run(BOX, 0, 3), run(BOX, 4, 8)],
        [run(BOX, 1, 8)],
        [run(BOX, 0, 5), run(BOX, 4, 8)],
        [run(BOX, 0, 4), run(BOX, 0, 4)],  # the number of elements is right
        # An element is stored in two boxes, and may fill a gap elsewhere.
        *([run(matrix((0, 0), (4, 6)), 1, 24), matrix(at, (1, 1))] for at in ((0, 1), (3, 5))),
        [matrix((0, 0), (4, 6)), matrix((1, 0), (1, 1))],
    ],
)
def test_gaps_and_overlaps_name_the_wanted_elements(stored):
    wanted = matrix((0, 0), (4, 6)) if stored[0].global_shape == (4, 6) else BOX
    place = f"elements 0 to {wanted.numel} of the box at {wanted.offset}"
    assert problems([wanted], [[run(wanted, 0, 0)], *([piece] for piece in stored)]) == [
        f"weight/w: {place} are not stored exactly once"
    ]


def test_a_gap_or_overlap_outside_the_wanted_range_does_not_matter():
    weight = box("w")
    stored = [[run(weight, 0, 2)], [run(weight, 1, 2)], [run(weight, 3, 8)]]
    plan = read_plan([run(weight, 4, 8)], sources_of(stored), PLACE)
    assert plan.reads == {2: [Read(4, 16, 0, Run((0,), (8,), 4, 8))]}


# ---------------------------------------------------------------------- layers of several types


@st.composite
def typed_regions(draw: st.DrawFn) -> list[Piece]:
    """Draw regions that tile one tensor; every region has its own type."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    types = st.sampled_from(["F32", "BF16", "U8"])
    return [
        whole("w", "weight", draw(types), shape, offset, extent)
        for offset, extent in draw(tilings(shape))
        if math.prod(extent)
    ]


@st.composite
def typed_cuts(draw: st.DrawFn, regions: list[Piece], ranks: int) -> list[list[Piece]]:
    """Draw `cuts` of each region separately, so no box has elements of two types."""
    by_rank: list[list[Piece]] = [[] for _ in range(ranks)]
    for region in regions:
        inner = msgspec.structs.replace(
            region, global_shape=region.shape, offset=(0,) * len(region.shape)
        )
        for rank, pieces in enumerate(draw(cuts([inner], ranks))):
            for piece in pieces:
                low = tuple(map(sum, zip(region.offset, piece.offset, strict=True)))
                by_rank[rank].append(
                    msgspec.structs.replace(piece, global_shape=region.global_shape, offset=low)
                )
    return [in_layout_order(pieces) for pieces in by_rank]


def by_type(piece: Piece) -> Piece:
    """Return `piece` under the key of the tensor with its type."""
    return msgspec.structs.replace(piece, key=f"{piece.key} {piece.dtype}")


@settings(max_examples=60, deadline=None)
@given(st.data(), typed_regions(), st.integers(1, 3), st.integers(1, 3))
def test_each_box_is_read_in_its_own_type_from_any_shards(data, regions, saved_by, loaded_by):
    shape = regions[0].global_shape
    tensors = {
        ("weight", f"w {dtype}"): random_tensor(shape, dtype, 0) for dtype in ("F32", "BF16", "U8")
    }
    stored = data.draw(typed_cuts(regions, saved_by))
    files = [b"".join(content(tensors, by_type(part)) for part in pieces) for pieces in stored]
    sources = sources_of(stored)
    for wanted in [*stored, *data.draw(typed_cuts(regions, loaded_by))]:
        plan = read_plan(wanted, sources, PLACE)
        filled, times = carry_out(plan, wanted, files)
        assert filled == [content(tensors, by_type(piece)) for piece in wanted]
        assert all(count.max(initial=0) <= 1 for count in times)
        for held in held_by_each(sources):
            assert read_plan(wanted, sources, PLACE, held=held) == plan


def test_rank_states_may_have_different_sizes():
    def state(rank: int, nbytes: int) -> Piece:
        return whole("rank_state", "rank_state", "U8", (3, nbytes), (rank, 0), (1, nbytes))

    stored = [[state(0, 16)], [state(1, 24)], [state(2, 24)]]
    plan = read_plan([state(0, 16), state(2, 24)], sources_of(stored), PLACE)
    assert {rank: [read.nbytes for read in reads] for rank, reads in plan.reads.items()} == {
        0: [16],
        2: [24],
    }


def test_every_difference_is_named_once_in_one_error():
    wanted = [box("absent"), box("shape"), box("type"), box("gap"), box("fine"), *LAYERS]
    gap = box("gap")
    stored = [
        [box("shape", 9), box("type", dtype="I32"), run(gap, 0, 4), box("fine"), box("extra")]
    ]
    lines = problems(wanted, stored, unexpected=("weight/extra",))
    assert lines == [
        "weight/extra: in the checkpoint, not in the model",
        "weight/absent: not in the checkpoint; the model has shape (8,)",
        "weight/shape: (9,) F32 in the checkpoint, (8,) F32 in the model",
        "weight/type: (8,) I32 in the checkpoint, (8,) F32 in the model",
        "weight/gap: elements 0 to 8 of the box at (0,) are not stored exactly once",
        "weight/w: not in the checkpoint; the model has shape (4, 2)",
    ]


def test_unexpected_tensors_of_these_kinds_are_listed():
    stored = [
        source(0, [box("w"), box("v"), box("w", kind="exp_avg")]),
        source(1, [box("u"), box("v", kind="rank_state", dtype="U8")]),
    ]
    w, v, u = (("weight", key) for key in "wvu")
    assert unexpected_tensors({w}, stored, {"weight"}) == {"weight/v", "weight/u"}
    assert unexpected_tensors({w}, stored, {"exp_avg"}) == {"exp_avg/w"}
    assert unexpected_tensors({w, v, u}, stored, {"weight"}) == set()


# ---------------------------------------------------------------------- hostile numbers

HUGE = [2**70, 2**63, 2**63 - 1, 2**62, -1, -(2**62), -(2**63), -(2**70)]


def assert_refused(sources: list[Source], wanted: list[Piece]) -> None:
    for held in (NOTHING_STORED, *held_by_each(sources)):
        with pytest.raises((CorruptCheckpointError, MissingStateError)) as caught:
            read_plan(wanted, sources, PLACE, held=held)
        assert PLACE in str(caught.value)
        assert "--ckpt-step" in str(caught.value)
    with as_arrays(), pytest.raises(type(caught.value), match=f"^{re.escape(str(caught.value))}$"):
        read_plan(wanted, sources, PLACE)


@pytest.mark.parametrize("number", [*HUGE, 5])
@pytest.mark.parametrize("position", range(3))
def test_a_placement_outside_the_tensor_is_refused(number, position):
    sound = source(1, [run(matrix((2, 0), (2, 6)), 0, 12)])
    placement = list(sound.placement)
    placement[position] = number
    other = source(0, [matrix((0, 0), (2, 6))])
    assert_refused([other, sound._replace(placement=tuple(placement))], [matrix((0, 0), (4, 6))])


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [((4,), 2), ((4, 6, 1), 4), ((), 1), *(((4, 6), numbers) for numbers in (0, 1, 4))],
)
def test_a_box_with_other_axes_or_a_placement_of_another_length_is_refused(shape, numbers):
    sound = source(0, [matrix((0, 0), (4, 6))])
    item = msgspec.structs.replace(sound.template.items[0], shape=shape, numel=1)
    template = msgspec.structs.replace(sound.template, items=(item,))
    forged = Source(0, template, (0,) * numbers)
    for sources in ([forged], [sound, forged]):
        assert_refused(sources, [matrix((0, 0), (4, 6))])


@pytest.mark.parametrize("wanted_same_box", [True, False])
def test_a_range_beyond_its_box_does_not_cover_the_next_rows(wanted_same_box):
    """Range [6, 18) of a box of 12 elements would extend into the following rows."""
    sound = source(0, [run(matrix((0, 0), (2, 6)), 0, 12)])
    wanted = run(matrix((0, 0), (2, 6)), 6, 12) if wanted_same_box else matrix((1, 0), (2, 6))
    assert_refused([sound._replace(placement=(0, 0, 6))], [wanted])


ALONE, LENIENT = "--no-load-optim", "--dist-ckpt-strictness log_all"
CONVERSION = "--ckpt-convert-format torch_dist --ckpt-convert-save DIR"


def test_a_lenient_load_leaves_out_the_layers_of_a_shared_key_that_are_not_stored():
    plan = read_plan(LAYERS, sources_of([LAYERS[:2]]), PLACE, lenient=True)
    assert plan.absent == (2, 3)
    assert sorted(read.wanted for read in plan.reads[0]) == [0, 1]
    with pytest.raises(MissingStateError, match="not stored exactly once"):
        read_plan([box("w")], sources_of([[run(box("w"), 0, 4)]]), PLACE, lenient=True)


@pytest.mark.parametrize(
    ("wanted", "stored", "unexpected", "expected"),
    [
        ([box("w", kind="exp_avg")], [box("v")], (), (ALONE, LENIENT)),
        ([box("w")], [box("v")], (), (LENIENT,)),
        ([box("w")], [box("v")], ("weight/head",), (LENIENT,)),
        ([box("w", kind="exp_avg")], [box("v")], ("exp_avg/head",), (ALONE, LENIENT)),
        ([box("w")], [box("w", dtype="BF16")], (), (ALONE, CONVERSION)),
        ([box("w"), box("w", kind="master")], [box("w", dtype="BF16")], (), (ALONE, CONVERSION)),
        ([box("w"), box("v")], [box("w", dtype="BF16")], (), ()),
        ([box("w", kind="buffer")], [box("w", kind="buffer", dtype="BF16")], (), (CONVERSION,)),
        ([box("w")], [box("w", 9)], (), ()),
        ([box("w"), box("v")], [box("w", 9)], ("weight/head",), ()),
        ([box("w"), box("v")], [run(box("w"), 0, 4)], (), ()),
    ],
)
def test_differences_name_the_flags_with_which_none_remains(wanted, stored, unexpected, expected):
    with pytest.raises(MissingStateError) as caught:
        read_plan(wanted, sources_of([stored]), PLACE)
    error = missing_state(PLACE, caught.value.differences, unexpected)
    remedy = str(error).splitlines()[-1]
    assert tuple(flag for flag in (ALONE, LENIENT, CONVERSION) if flag in remedy) == expected
