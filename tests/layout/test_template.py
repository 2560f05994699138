"""Layouts are aligned without gaps; fingerprints tell all that differs; templates are shared."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt.errors import LayoutError
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.template import (
    PlanCache,
    PlanCounters,
    build_template,
    order,
    pieces_of,
    placed,
    tensor_names,
)
from tests.support.strategies import keys, kinds, layout_of, moved, piece_lists, pieces

PIECE = Piece("layer.w", "weight", "F32", (8, 8), (2, 2), (3, 3), 2, 7)
#: One valid other value for every field of PIECE; the element count may change with it.
CHANGES = {
    "key": "layer.v",
    "kind": "master",
    "dtype": "I32",
    "global_shape": (9, 8),
    "offset": (3, 2),
    "shape": (3, 4),
    "start": 1,
    "end": 8,
}


class Store(dict[str, bytes]):
    """The agent's template store, as far as a plan cache sees it."""

    def cache(self) -> PlanCache:
        return PlanCache(self.get, self.__setitem__)


def alignment_of(number: int) -> int:
    """Return the largest power of two that divides a number, up to a cache line."""
    return next(power for power in (64, 32, 16, 8, 4, 2, 1) if number % power == 0)


@given(st.lists(pieces(), max_size=8))
def test_order_is_a_stable_permutation_with_what_keeps_the_rest_aligned_first(unordered):
    positions = order(unordered)
    assert sorted(positions) == list(range(len(unordered)))
    ranked = [
        (-alignment_of(piece.nbytes), -itemsize(piece.dtype), position)
        for position, piece in ((position, unordered[position]) for position in positions)
    ]
    assert ranked == sorted(ranked)


@given(st.lists(st.lists(pieces(), max_size=4), max_size=4))
def test_the_order_that_is_kept_is_that_of_the_pieces_at_hand(calls):
    plans = PlanCache()
    for unordered in [*calls, *calls[::-1]]:
        assert plans.order(list(unordered)) == order(unordered)
    if calls:
        changing = list(calls[0])
        plans.order(changing)
        changing.append(Piece("new", "weight", "F64", (8,), (0,), (8,), 0, 8))
        assert plans.order(changing) == order(changing), "a list that has grown since"


@given(piece_lists)
def test_tensors_lie_end_to_end_each_aligned_to_its_element_and_as_well_as_its_bytes(ordered):
    template = build_template(ordered, placed(ordered)[0])
    position = 0
    for item, piece in zip(template.items, ordered, strict=True):
        assert item.byte_offset == position
        assert item.byte_offset % itemsize(item.dtype) == 0
        assert item.byte_offset % alignment_of(piece.nbytes) == 0
        position += piece.nbytes
    assert template.nbytes == position


@settings(max_examples=50)
@given(piece_lists)
def test_a_layout_gives_back_the_pieces_that_it_was_made_of(ordered):
    layout = layout_of(ordered)
    assert pieces_of(layout.template, layout.placement) == ordered
    assert layout.nbytes == sum(piece.nbytes for piece in ordered)


def test_a_placement_of_another_length_than_the_template_is_refused():
    layout = layout_of([PIECE, moved(PIECE, 1)])
    with pytest.raises(LayoutError, match="placement has 2 numbers, its template needs 6"):
        pieces_of(layout.template, layout.placement[:2])


def test_kinds_of_one_run_have_one_place():
    """A large job's manifest consists of placements: of Adam's four kinds three say nothing new."""
    elsewhere = msgspec.structs.replace(PIECE, start=3, end=8)
    runs = [
        msgspec.structs.replace(run, kind=kind)
        for kind in ("master", "exp_avg", "exp_avg_sq", "weight")
        for run in (PIECE, elsewhere)
    ]
    layout = layout_of(runs)
    assert layout.placement == (2, 2, 2, 2, 2, 3)
    assert [item.placed_at for item in layout.template.items] == 4 * [0, 3]
    another_key = msgspec.structs.replace(PIECE, key="other.w")
    assert len(layout_of([PIECE, another_key]).placement) == 6, "chance must not make a template"


def test_a_template_refuses_a_piece_that_leaves_its_tensor():
    with pytest.raises(LayoutError, match="leaves the global shape"):
        build_template([msgspec.structs.replace(PIECE, offset=(6, 2))], [0])


@given(st.lists(st.tuples(kinds, keys), max_size=12))
def test_tensor_names_are_unique_and_start_with_kind_and_key(pairs):
    names = tensor_names(pairs)
    assert len(set(names)) == len(pairs)
    for name, (kind, key) in zip(names, pairs, strict=True):
        assert name.rpartition("#")[0] == f"{kind}/{key}"


def test_every_field_of_a_piece_has_a_case_below():
    assert set(CHANGES) == set(PIECE.__struct_fields__)


def found_again(first, second):
    """Whether the layout of `first` is also taken for that of `second`."""
    cache = PlanCache()
    return cache.layout(first) is cache.layout(second)


@pytest.mark.parametrize("field", CHANGES)
def test_a_layout_is_not_found_again_when_any_field_has_changed(field):
    changed = msgspec.structs.replace(PIECE, **{field: CHANGES[field]})
    assert not found_again([PIECE], [changed])
    assert layout_of([changed]) != layout_of([PIECE])


@pytest.mark.parametrize("field", [name for name in CHANGES if name != "offset"])
def test_the_template_fingerprint_changes_with_all_but_the_place(field):
    # `start` alone changes the element count too; start and end together: see below.
    changed = msgspec.structs.replace(PIECE, **{field: CHANGES[field]})
    assert layout_of([changed]).template_fingerprint != layout_of([PIECE]).template_fingerprint


@settings(max_examples=50)
@given(piece_lists, piece_lists)
def test_a_layout_is_found_again_exactly_for_equal_pieces(one, other):
    assert found_again(one, other) == (one == other)
    assert found_again(one, [msgspec.structs.replace(piece) for piece in one])


def test_text_that_moves_from_one_field_to_its_neighbour_changes_the_fingerprint():
    first = msgspec.structs.replace(PIECE, key="ab", kind="c")
    second = msgspec.structs.replace(PIECE, key="a", kind="bc")
    assert layout_of([first]).template_fingerprint != layout_of([second]).template_fingerprint


def test_pieces_that_change_places_or_come_or_go_make_another_layout():
    other = msgspec.structs.replace(PIECE, offset=(0, 0))
    assert not found_again([PIECE, other], [other, PIECE])
    assert not found_again([PIECE, other], [PIECE])
    assert not found_again([PIECE], [PIECE, other])


def test_a_list_that_changes_later_does_not_change_what_its_layout_is_found_for():
    cache, pieces = PlanCache(), [PIECE]
    one = cache.layout(pieces)
    pieces.append(msgspec.structs.replace(PIECE, key="another"))
    assert cache.layout(pieces) is not one
    assert cache.layout([PIECE]) is one


@settings(max_examples=50)
@given(st.lists(pieces().filter(lambda piece: piece.offset), max_size=6), st.integers(1, 9))
def test_like_stages_share_the_template_but_not_the_layout(stage, rows):
    stage = [
        msgspec.structs.replace(piece, global_shape=(99, *piece.global_shape[1:]))
        for piece in stage
    ]
    stage = [stage[position] for position in order(stage)]
    next_stage = [moved(piece, rows) for piece in stage]
    store = Store()
    here, there = store.cache(), store.cache()
    mine, theirs = here.layout(stage), there.layout(next_stage)
    assert mine.template_fingerprint == theirs.template_fingerprint
    assert mine.template == theirs.template == build_template(next_stage, placed(next_stage)[0])
    assert (mine == theirs) == (not stage)
    assert here.counters == PlanCounters(misses=1)
    assert there.counters == PlanCounters(shared_hits=1)
    assert pieces_of(theirs.template, theirs.placement) == next_stage


def test_ranges_of_equal_length_share_the_template_and_differ_in_their_start():
    shifted = msgspec.structs.replace(PIECE, start=PIECE.start + 1, end=PIECE.end + 1)
    one, other = layout_of([PIECE]), layout_of([shifted])
    assert one.template_fingerprint == other.template_fingerprint
    assert one.placement != other.placement


def test_the_same_pieces_are_a_local_hit_and_the_very_same_layout():
    store = Store()
    cache = store.cache()
    first = cache.layout([PIECE])
    assert cache.layout([msgspec.structs.replace(PIECE)]) is first
    assert cache.counters == PlanCounters(local_hits=1, misses=1)
    assert len(store) == 1


@settings(max_examples=50)
@given(piece_lists)
def test_a_restarted_rank_has_its_plan_back_from_the_agent(ordered):
    store = Store()
    before = store.cache().layout(ordered)
    restarted = store.cache()
    assert restarted.layout(ordered) == before
    assert restarted.counters == PlanCounters(shared_hits=1)


def test_without_an_agent_every_new_layout_is_a_miss():
    cache = PlanCache()
    cache.layout([PIECE])
    cache.layout([moved(PIECE, 1)])
    assert cache.counters == PlanCounters(misses=2)


@pytest.mark.parametrize("stored", [b"", b"\xc1", b"\x93\x01\x02\x03", b"not a template"])
def test_what_the_agent_holds_but_cannot_be_read_is_a_miss_not_an_error(stored):
    store = Store({layout_of([PIECE]).template_fingerprint: stored})
    cache = store.cache()
    layout = cache.layout([PIECE])
    assert layout == layout_of([PIECE])
    assert cache.counters == PlanCounters(misses=1)
    assert store.cache().layout([PIECE]) == layout


def test_old_layouts_make_room_and_are_found_again_at_the_agent():
    store = Store()
    cache = store.cache()
    stages = [[moved(PIECE, 0)], *([msgspec.structs.replace(PIECE, key=f"k{n}")] for n in range(8))]
    for stage in stages:
        cache.layout(stage)
    assert cache.counters == PlanCounters(misses=9)
    cache.layout(stages[-1])
    assert cache.counters == PlanCounters(local_hits=1, misses=9)
    cache.layout(stages[0])
    assert cache.counters == PlanCounters(local_hits=1, shared_hits=1, misses=9)
