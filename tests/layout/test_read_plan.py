"""Read plans: they fill every wanted element exactly once from any shards, or fail with one error.

The error names everything that cannot be filled. The tests compare with a brute-force copy of
global numpy tensors, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_flashckpt.errors import CorruptCheckpointError, MissingStateError
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.exact_match import pieces_stored_once, stored_tensors
from megatron_flashckpt.layout.piece import Piece, Shape, equal_shares
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
    Sizes,
    Tensors,
    carry_out,
    content,
    files_of,
    local_boxes,
    model_tensors,
    random_tensor,
    run,
    sizes,
    source,
    sources_of,
    stored_by,
    wanted_by,
    whole,
)

PLACE = "/ckpt/iter_0000007"


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
    return plan


def problems(
    wanted: list[Piece],
    stored: Sequence[list[Piece]],
    unexpected: tuple[str, ...] = (),
    resizable: Sequence[int] = (),
) -> list[str]:
    with pytest.raises(MissingStateError) as caught:
        read_plan(wanted, sources_of(stored), PLACE, resizable)
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


@settings(max_examples=150, deadline=None)
@given(st.data(), tensors_drawn(), st.integers(1, 4), st.integers(1, 3))
def test_any_shards_can_be_read_as_any_other_shards(data, drawn, saved_by, loaded_by):
    tensors, wholes = drawn
    stored = data.draw(cuts(wholes, saved_by))
    for wanted in data.draw(cuts(wholes, loaded_by)):
        assert_filled(tensors, stored, wanted)


@settings(max_examples=40, deadline=None)
@given(st.data(), sizes, sizes)
def test_a_model_of_any_parallel_sizes_fills_any_rank_of_any_others(data, saved, loaded):
    tensors = model_tensors(seed=3)
    rank = [data.draw(st.integers(0, n - 1)) for n in (loaded.tp, loaded.pp, loaded.ep, loaded.dp)]
    assert_filled(tensors, stored_by(saved), wanted_by(loaded, *rank))


@settings(max_examples=50, deadline=None)
@given(tensors_drawn(), st.integers(1, 5), st.data())
def test_equal_shares_of_all_replicas_fill_one_whole_model(drawn, replicas, data):
    tensors, wholes = drawn
    ordered = in_layout_order(wholes)
    lengths = [(piece.numel, itemsize(piece.dtype)) for piece in ordered]
    stored = [
        [
            run(piece, *bounds)
            for piece, bounds in zip(ordered, equal_shares(lengths, replicas, index), strict=True)
        ]
        for index in range(replicas)
    ]
    plan = assert_filled(tensors, data.draw(st.permutations(stored)), ordered)
    # From equal boxes, the plan reads only the wanted bytes.
    read = sum(read.nbytes for reads in plan.reads.values() for read in reads)
    assert read == sum(piece.nbytes for piece in ordered)


# ---------------------------------------------------------------------- cuts that Megatron makes


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(16, 24), (24, 16)])
def test_optimizer_shards_fit_any_other_number_of_replicas(saved_by, loaded_by):
    tensors = model_tensors(seed=1)
    saved = Sizes(1, 1, 1, saved_by, grouped=False, distributed=True)
    loaded = Sizes(1, 1, 1, loaded_by, grouped=False, distributed=True)
    wanted = [
        [piece for piece in wanted_by(loaded, 0, 0, 0, dp) if piece.kind == "exp_avg"]
        for dp in range(loaded_by)
    ]
    plans = [assert_filled(tensors, stored_by(saved), pieces) for pieces in wanted]
    read = sum(read.nbytes for plan in plans for reads in plan.reads.values() for read in reads)
    assert read == sum(piece.nbytes for pieces in wanted for piece in pieces)


def test_tied_embeddings_are_saved_once_and_wanted_by_two_stages():
    saved = Sizes(2, 4, 1, 2, grouped=False, distributed=True)
    loaded = Sizes(4, 2, 1, 1, grouped=False, distributed=False)
    tensors = model_tensors(seed=4)
    for stage in range(2):
        wanted = [p for p in wanted_by(loaded, 1, stage, 0, 0) if p.key == "embedding"]
        assert {piece.kind for piece in wanted} == {"weight", "master", "exp_avg", "fp8"}
        assert_filled(tensors, stored_by(saved), wanted)
    # Both copies on one rank, a stage that does not tie them: both are filled.
    twice = [p for p in local_boxes(loaded, 0, 0, 0, writes=True) if p.key == "embedding"] * 2
    assert_filled(tensors, stored_by(saved), twice)


def test_an_empty_tensor_must_be_stored_but_needs_no_bytes():
    empty = whole("w", "weight", "F32", (0, 3), (0, 0), (0, 3))
    assert read_plan([empty], sources_of([[empty]]), PLACE) == ReadPlan({}, ())
    assert problems([empty], [[box("v")]]) == [
        "weight/w: not in the checkpoint; the model has shape (0, 3)"
    ]


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


def test_only_resizable_pieces_may_have_another_size():
    wanted = [matrix((0, 0), (5, 6), (5, 6))]
    (line,) = problems(wanted, [[matrix((0, 0), (4, 6))]])
    assert line == "weight/w: (4, 6) F32 in the checkpoint, (5, 6) F32 in the model"


@pytest.mark.parametrize(
    "stored",
    [
        whole("w", "weight", "F32", (4,), (0,), (4,)),
        whole("w", "weight", "BF16", (4, 6), (0, 0), (4, 6)),
    ],
    ids=["other axes", "other type"],
)
def test_a_resized_tensor_must_have_the_same_axes_and_type(stored):
    (line,) = problems([matrix((0, 0), (5, 6), (5, 6))], [[stored]], resizable=[0])
    assert line.endswith(" in the checkpoint, (5, 6) F32 in the model")


def test_a_gap_in_a_resized_tensor_is_an_error():
    stored = [[run(matrix((0, 0), (4, 6)), 0, 23)]]
    wanted = matrix((0, 0), (5, 6), (5, 6))
    (line,) = problems([wanted], stored, resizable=[0])
    assert line == "weight/w: elements 0 to 30 of the box at (0, 0) are not stored exactly once"


# ---------------------------------------------------------------------- inconsistent shards


def runs_of(stored):
    """Return a strategy for a non-empty run, as rank and position."""
    runs = [
        (rank, n) for rank, held in enumerate(stored) for n, part in enumerate(held) if part.numel
    ]
    assume(runs)
    return st.sampled_from(runs)


@settings(max_examples=100, deadline=None)
@given(st.data(), tensors_drawn(), st.integers(2, 4))
def test_a_missing_or_doubled_run_is_always_an_error(data, drawn, ranks):
    _, wholes = drawn
    stored = data.draw(cuts(wholes, ranks))
    rank, position = data.draw(runs_of(stored))
    victim = stored[rank][position]
    if data.draw(st.booleans()):
        stored[rank] = stored[rank][:position] + stored[rank][position + 1 :]
    else:
        stored.append([victim])
    wanted = [piece for piece in wholes if (piece.kind, piece.key) == (victim.kind, victim.key)]
    (line,) = problems(wanted, stored)
    assert line.startswith(f"{victim.kind}/{victim.key}: ")


@settings(max_examples=100, deadline=None)
@given(st.data(), tensors_drawn())
def test_an_element_stored_in_two_boxes_is_an_error(data, drawn):
    _, wholes = drawn
    piece = data.draw(st.sampled_from(wholes))
    if not piece.numel:
        return
    (stored,) = data.draw(cuts([piece], 1))
    element = tuple(data.draw(st.integers(0, size - 1)) for size in piece.global_shape)
    again = whole(
        piece.key, piece.kind, piece.dtype, piece.global_shape, element, (1,) * len(element)
    )
    (line,) = problems([piece], [stored, [again]])
    assert "are not stored exactly once" in line


@pytest.mark.parametrize("element", [(0, 1), (1, 0), (3, 5)])
def test_an_element_stored_twice_does_not_hide_a_gap(element):
    """The stored elements are as many as the wanted ones, and no box stores an element twice."""
    stored = [[run(matrix((0, 0), (4, 6)), 1, 24)], [matrix(element, (1, 1))]]
    (line,) = problems([matrix((0, 0), (4, 6))], stored)
    assert line == "weight/w: elements 0 to 24 of the box at (0, 0) are not stored exactly once"


@pytest.mark.parametrize(
    "stored",
    [
        [(0, 3), (4, 8)],
        [(0, 7)],
        [(1, 8)],
        [(0, 5), (4, 8)],
        [(0, 8), (3, 4)],
        [(0, 4), (0, 4)],  # the number of elements is right
    ],
)
def test_gaps_and_overlaps_name_the_wanted_elements(stored):
    weight = box("w")
    (line,) = problems([weight], [[run(weight, 0, 0)], *([run(weight, *r)] for r in stored)])
    assert line == "weight/w: elements 0 to 8 of the box at (0,) are not stored exactly once"


def test_a_gap_or_overlap_outside_the_wanted_range_does_not_matter():
    weight = box("w")
    stored = [[run(weight, 0, 2)], [run(weight, 1, 2)], [run(weight, 3, 8)]]
    plan = read_plan([run(weight, 4, 8)], sources_of(stored), PLACE)
    assert plan.reads == {2: [Read(4, 16, 0, Run((0,), (8,), 4, 8))]}


@pytest.mark.parametrize(
    "other",
    [box("w", dtype="BF16"), box("w", 9), matrix((0, 0), (4, 6))],
    ids=["type", "size", "axes"],
)
@pytest.mark.parametrize("start", [0, 4, 8])
def test_ranks_with_contradictory_shapes_or_types_are_not_mixed(other, start):
    weight = box("w")
    # One rank may hold the whole tensor.
    (line,) = problems([weight], [[run(weight, 0, start)], [run(other, 4, 8)]])
    if other.global_shape == weight.global_shape:
        types = "BF16, F32" if start else "BF16"
        place = "elements 0 to 8 of the box at (0,)"
        assert line == f"weight/w: {place} are {types} in the checkpoint, F32 in the model"
        return
    stored_as = sorted([((8,), "F32"), (other.global_shape, other.dtype)])
    known = ", ".join(f"{shape} {dtype}" for shape, dtype in stored_as)
    assert line == f"weight/w: {known} in the checkpoint, (8,) F32 in the model"


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
        for rank in range(saved_by):
            held = pieces_stored_once(sources[rank], stored_tensors(sources))
            assert read_plan(wanted, sources, PLACE, held=held) == plan


def layer(number: int, dtype: str) -> Piece:
    return whole("norm", "weight", dtype, (4, 8), (number, 0), (1, 8))


def test_a_layer_wanted_in_another_type_is_named():
    stored = [[layer(0, "F32"), layer(1, "BF16")], [layer(2, "BF16"), layer(3, "BF16")]]
    place = "weight/norm: elements 0 to 8 of the box at"
    assert problems([layer(0, "BF16"), layer(3, "F32"), layer(1, "BF16")], stored) == [
        f"{place} (0, 0) are F32 in the checkpoint, BF16 in the model",
        f"{place} (3, 0) are BF16 in the checkpoint, F32 in the model",
    ]


def test_a_box_over_layers_of_several_types_is_named():
    both = whole("norm", "weight", "BF16", (4, 8), (0, 0), (2, 8))
    (line,) = problems([both], [[layer(0, "F32"), layer(1, "BF16")]])
    assert line == (
        "weight/norm: elements 0 to 16 of the box at (0, 0) are BF16, F32 in the checkpoint, "
        "BF16 in the model"
    )


def test_rank_states_may_have_different_sizes():
    def state(rank: int, nbytes: int) -> Piece:
        return whole("rank_state", "rank_state", "U8", (3, nbytes), (rank, 0), (1, nbytes))

    stored = [[state(0, 16)], [state(1, 24)], [state(2, 24)]]
    plan = read_plan([state(0, 16), state(2, 24)], sources_of(stored), PLACE)
    assert {rank: [read.nbytes for read in reads] for rank, reads in plan.reads.items()} == {
        0: [16],
        2: [24],
    }


def test_a_kind_does_not_replace_another():
    (line,) = problems([box("w", kind="exp_avg")], [[box("w", kind="exp_avg_sq")]])
    assert line == "exp_avg/w: not in the checkpoint; the model has shape (8,)"


def test_every_difference_is_named_in_one_error():
    wanted = [box("absent"), box("shape"), box("type"), box("gap"), box("fine")]
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
    ]


def test_a_difference_of_many_layers_is_reported_once():
    layers = [whole("w", "weight", "F32", (4, 2), (n, 0), (1, 2)) for n in range(4)]
    assert len(problems(layers, [[box("other")]])) == 1


def test_unexpected_tensors_are_differences_even_if_none_is_missing():
    assert missing_state(PLACE, (), ("weight/z", "master/a")).differences == (
        "master/a: in the checkpoint, not in the model",
        "weight/z: in the checkpoint, not in the model",
    )


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
    with pytest.raises((CorruptCheckpointError, MissingStateError)) as caught:
        read_plan(wanted, sources, PLACE)
    assert PLACE in str(caught.value)
    assert "--ckpt-step" in str(caught.value)


@pytest.mark.parametrize("number", [*HUGE, 5])
@pytest.mark.parametrize("position", range(3))
def test_a_placement_outside_the_tensor_is_refused(number, position):
    sound = source(1, [run(matrix((2, 0), (2, 6)), 0, 12)])
    placement = list(sound.placement)
    placement[position] = number
    other = source(0, [matrix((0, 0), (2, 6))])
    assert_refused([other, sound._replace(placement=tuple(placement))], [matrix((0, 0), (4, 6))])


@pytest.mark.parametrize("wanted_same_box", [True, False])
def test_a_range_beyond_its_box_does_not_cover_the_next_rows(wanted_same_box):
    """Range [6, 18) of a box of 12 elements would extend into the following rows."""
    sound = source(0, [run(matrix((0, 0), (2, 6)), 0, 12)])
    wanted = run(matrix((0, 0), (2, 6)), 6, 12) if wanted_same_box else matrix((1, 0), (2, 6))
    assert_refused([sound._replace(placement=(0, 0, 6))], [wanted])


@pytest.mark.parametrize("shape", [(4,), (4, 6, 1), ()])
def test_a_box_with_other_axes_than_its_tensor_is_refused(shape):
    sound = source(0, [matrix((0, 0), (4, 6))])
    item = msgspec.structs.replace(sound.template.items[0], shape=shape, numel=1)
    forged = msgspec.structs.replace(sound.template, items=(item,))
    assert_refused([Source(0, forged, (0,) * (len(shape) + 1))], [matrix((0, 0), (4, 6))])


@pytest.mark.parametrize("placement", [(), (0,), (0, 0, 0, 0)])
def test_a_placement_of_another_length_is_refused(placement):
    sound = source(0, [matrix((0, 0), (4, 6))])
    forged = sound._replace(placement=placement)
    with pytest.raises(CorruptCheckpointError, match="do not fit their template"):
        read_plan([matrix((0, 0), (4, 6))], [sound, forged], PLACE)
    with pytest.raises(CorruptCheckpointError, match="do not fit their template"):
        read_plan([matrix((0, 0), (4, 6))], [forged], PLACE)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(HUGE) | st.integers(-8, 30))
def test_with_any_placement_a_plan_stays_within_the_stored_runs(data, number):
    """The plan fails, or its reads lie inside the runs that the rank stores."""
    piece = matrix((0, 0), (4, 6))
    stored = data.draw(cuts([piece], 2))
    sources = sources_of(stored)
    rank = data.draw(st.sampled_from([r for r, held in enumerate(stored) if held]))
    placement = list(sources[rank].placement)
    placement[data.draw(st.integers(0, len(placement) - 1))] = number
    sources[rank] = sources[rank]._replace(placement=tuple(placement))
    try:
        plan = read_plan([piece], sources, PLACE)
    except (CorruptCheckpointError, MissingStateError):
        return
    for reader, reads in plan.reads.items():
        nbytes = sources[reader].template.nbytes
        for read in reads:
            assert 0 <= read.source_offset < read.source_offset + read.nbytes <= nbytes
            assert 0 <= read.stored.start < read.stored.end <= math.prod(read.stored.shape)


ALONE, LENIENT = "--no-load-optim", "--dist-ckpt-strictness log_all"
CONVERSION = "--ckpt-convert-format torch_dist --ckpt-convert-save DIR"
LAYERS = [whole("w", "weight", "F32", (4, 2), (n, 0), (1, 2)) for n in range(4)]


def test_elements_that_are_not_stored_at_all_are_named_so():
    (line,) = problems([LAYERS[2]], [LAYERS[:2]])
    assert line == "weight/w: elements 0 to 2 of the box at (2, 0) are not in the checkpoint"


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
