"""Layouts without gaps, fingerprints that differ if any field differs, and shared templates."""

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
    """A stand-in for the agent's template store, with the functions that a plan cache calls."""

    def cache(self) -> PlanCache:
        return PlanCache(self.get, self.__setitem__)


def alignment_of(number: int) -> int:
    """Return the largest power of two that divides a number, up to a cache line."""
    return next(power for power in (64, 32, 16, 8, 4, 2, 1) if number % power == 0)


@given(st.lists(pieces(), max_size=8))
def test_the_order_is_a_stable_permutation_by_falling_alignment(unordered):
    positions = order(unordered)
    assert sorted(positions) == list(range(len(unordered)))
    ranked = [
        (-alignment_of(piece.nbytes), -itemsize(piece.dtype), position)
        for position, piece in ((position, unordered[position]) for position in positions)
    ]
    assert ranked == sorted(ranked)


@given(piece_lists)
def test_a_layout_gives_back_its_pieces_end_to_end_and_aligned(ordered):
    layout = layout_of(ordered)
    assert pieces_of(layout.template, layout.placement) == ordered
    position = 0
    for item, piece in zip(layout.template.items, ordered, strict=True):
        assert item.byte_offset == position
        assert item.byte_offset % itemsize(item.dtype) == 0
        assert item.byte_offset % alignment_of(piece.nbytes) == 0
        position += piece.nbytes
    assert layout.nbytes == position


def test_a_placement_of_another_length_than_the_template_is_refused():
    layout = layout_of([PIECE, moved(PIECE, 1)])
    with pytest.raises(LayoutError, match="placement has 2 numbers, its template needs 6"):
        pieces_of(layout.template, layout.placement[:2])


def test_kinds_of_one_run_share_one_place():
    """A large job's manifest consists mostly of placements, which Adam's four kinds can share."""
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
    assert len(layout_of([PIECE, another_key]).placement) == 6, (
        "pieces of two keys share no place by chance"
    )


def test_a_template_refuses_a_piece_that_leaves_its_tensor():
    with pytest.raises(LayoutError, match="leaves the global shape"):
        build_template([msgspec.structs.replace(PIECE, offset=(6, 2))], [0])


@given(st.lists(st.tuples(kinds, keys), max_size=12))
def test_tensor_names_are_unique_and_start_with_kind_and_key(pairs):
    names = tensor_names(pairs)
    assert len(set(names)) == len(pairs)
    for name, (kind, key) in zip(names, pairs, strict=True):
        assert name.rpartition("#")[0] == f"{kind}/{key}"


def found_again(first, second):
    """Return whether a cache gives the layout of `first` for `second` too."""
    cache = PlanCache()
    return cache.layout(first) is cache.layout(second)


@pytest.mark.parametrize("field", PIECE.__struct_fields__)
def test_a_change_of_any_field_makes_another_layout(field):
    changed = msgspec.structs.replace(PIECE, **{field: CHANGES[field]})
    assert not found_again([PIECE], [changed])
    assert layout_of([changed]) != layout_of([PIECE])
    # Equal stages share a template. `start` alone also changes the number of elements.
    fingerprints = {layout_of([piece]).template_fingerprint for piece in (PIECE, changed)}
    assert len(fingerprints) == (1 if field == "offset" else 2)


def test_text_of_two_fields_and_ranges_of_equal_length_are_told_apart():
    first, second, shifted = (
        layout_of([msgspec.structs.replace(PIECE, **fields)])
        for fields in (
            {"key": "ab", "kind": "c"},
            {"key": "a", "kind": "bc"},
            {"key": "ab", "kind": "c", "start": 3, "end": 8},
        )
    )
    assert first.template_fingerprint != second.template_fingerprint
    assert first.template_fingerprint == shifted.template_fingerprint
    assert first.placement != shifted.placement


def test_a_cached_layout_is_that_of_the_pieces_at_the_first_call():
    cache, pieces = PlanCache(), [PIECE]
    other = msgspec.structs.replace(PIECE, offset=(0, 0))
    one = cache.layout(pieces)
    pieces.append(other)
    both = cache.layout(pieces)
    assert both is not one
    assert cache.layout([PIECE]) is one
    assert cache.layout([other, PIECE]) is not both


@settings(max_examples=50)
@given(piece_lists, piece_lists)
def test_a_cached_layout_is_reused_exactly_for_equal_pieces(one, other):
    assert found_again(one, other) == (one == other)
    assert found_again(one, [msgspec.structs.replace(piece) for piece in one])


@settings(max_examples=50)
@given(st.lists(pieces().filter(lambda piece: piece.offset), max_size=6), st.integers(1, 9))
def test_equal_stages_share_the_template_but_not_the_layout(stage, rows):
    stage = [
        msgspec.structs.replace(piece, global_shape=(99, *piece.global_shape[1:]))
        for piece in stage
    ]
    stage = [stage[position] for position in order(stage)]
    next_stage = [moved(piece, rows) for piece in stage]
    store = Store()
    here, there = store.cache(), store.cache()
    layout, next_layout = here.layout(stage), there.layout(next_stage)
    assert layout.template_fingerprint == next_layout.template_fingerprint
    assert (
        layout.template == next_layout.template == build_template(next_stage, placed(next_stage)[0])
    )
    assert (layout == next_layout) == (not stage)
    assert here.origins == {"computed": 1}
    assert there.origins == {"found": 1}
    assert pieces_of(next_layout.template, next_layout.placement) == next_stage


@pytest.mark.parametrize("stored", [b"", b"\xc1", b"\x93\x01\x02\x03", b"not a template"])
def test_an_unreadable_template_of_the_agent_is_a_miss_not_an_error(stored):
    store = Store({layout_of([PIECE]).template_fingerprint: stored})
    cache = store.cache()
    layout = cache.layout([PIECE])
    assert layout == layout_of([PIECE])
    assert cache.origins == {"computed": 1}
    assert store.cache().layout([PIECE]) == layout


def test_evicted_layouts_are_fetched_again_from_the_agent():
    store = Store()
    cache = store.cache()
    stages = [[moved(PIECE, 0)], *([msgspec.structs.replace(PIECE, key=f"k{n}")] for n in range(8))]
    for stage in stages:
        cache.layout(stage)
    assert cache.origins == {"computed": 9}
    cache.layout(stages[-1])
    assert cache.origins == {"kept": 1, "computed": 9}
    cache.layout(stages[0])
    assert cache.origins == {"kept": 1, "found": 1, "computed": 9}
