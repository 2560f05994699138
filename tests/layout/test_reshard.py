"""Common elements of two runs, compared with a brute-force computation.

The computation cuts boxes and ranges out of a numpy array of distinct numbers, so equal numbers are
equal elements.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from megatron_flashckpt.layout.reshard import (
    Box,
    Region,
    Run,
    blocks,
    overlap,
    regions,
)

Shape = tuple[int, ...]


def numbered(global_shape: Shape) -> np.ndarray:
    return np.arange(math.prod(global_shape)).reshape(global_shape)


def elements(run: Run, tensor: np.ndarray) -> np.ndarray:
    """Return the numbers of the elements of `run`, in its order."""
    box = tensor[tuple(slice(a, a + n) for a, n in zip(run.offset, run.shape, strict=True))]
    return box.reshape(-1)[run.start : run.end]


@st.composite
def boxes(draw: st.DrawFn, global_shape: Shape) -> Box:
    """Draw any box, often whole along an axis, because parallelism leaves most axes whole."""
    offset, shape = [], []
    for size in global_shape:
        low, n = 0, size
        if draw(st.booleans()):
            low = draw(st.integers(0, size))
            n = draw(st.integers(0, size - low))
        offset.append(low)
        shape.append(n)
    return tuple(offset), tuple(shape)


@st.composite
def runs(draw: st.DrawFn, global_shape: Shape) -> Run:
    offset, shape = draw(boxes(global_shape))
    start, end = 0, math.prod(shape)
    if draw(st.booleans()):
        start = draw(st.integers(0, end))
        end = draw(st.integers(start, end))
    return Run(offset, shape, start, end)


global_shapes = st.one_of(st.lists(st.integers(low, 5), max_size=4).map(tuple) for low in (0, 2, 2))
pairs = global_shapes.flatmap(lambda shape: st.tuples(st.just(shape), runs(shape), runs(shape)))


# ---------------------------------------------------------------------- a range is a few boxes


@given(global_shapes.flatmap(runs))
def test_a_range_of_n_axes_is_at_most_2n_minus_1_disjoint_boxes(run):
    tensor = numbered(run.shape)
    parts = list(blocks(run.shape, run.start, run.end))
    assert len(parts) <= max(2 * len(run.shape) - 1, 1)
    assert all(math.prod(shape) for _, shape in parts)
    inside = [elements(Run(*block, 0, math.prod(block[1])), tensor) for block in parts]
    # The elements are in order without repetition: disjoint boxes, and the whole range.
    assert [n for part in inside for n in part.tolist()] == list(range(run.start, run.end))


def test_the_worst_range_reaches_this_bound():
    assert len(list(blocks((3, 3, 3, 3), 1, 80))) == 7


# ---------------------------------------------------------------------- two runs


def copied(source: np.ndarray, target: np.ndarray, region: Region) -> None:
    """Copy one region with checked bounds."""
    there = _view(source, region.shape, region.source_start, region.source_strides)
    _view(target, region.shape, region.target_start, region.target_strides)[...] += there + 1


def _view(flat: np.ndarray, shape: Shape, start: int, strides: Shape) -> np.ndarray:
    last = start + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    assert 0 <= start <= last < flat.size
    steps = [step * flat.itemsize for step in strides]
    return as_strided(flat[start:], shape, steps)


@settings(max_examples=300)
@given(pairs)
def test_regions_copy_exactly_the_common_elements_once(pair):
    global_shape, stored, wanted = pair
    tensor = numbered(global_shape)
    source = elements(stored, tensor)
    # Additions start at zero, so an element copied twice has a wrong number.
    target = np.zeros(wanted.end - wanted.start, dtype=np.int64)
    for region in regions(stored, wanted):
        copied(source.copy(), target, region)
    expected = elements(wanted, tensor)
    np.testing.assert_array_equal(target, np.where(np.isin(expected, source), expected + 1, 0))


@given(pairs)
def test_an_overlap_counts_and_bounds_the_common_elements(pair):
    global_shape, stored, wanted = pair
    tensor = numbered(global_shape)
    is_wanted = np.isin(elements(stored, tensor), elements(wanted, tensor))
    result = overlap(stored, wanted)
    assert result.numel == is_wanted.sum()
    if result.numel:
        (places,) = np.nonzero(is_wanted)
        assert (result.low, result.high) == (
            stored.start + places[0],
            stored.start + places[-1] + 1,
        )


@given(pairs)
def test_elements_without_a_gap_on_both_sides_are_one_region(pair):
    global_shape, stored, wanted = pair
    tensor = numbered(global_shape)
    source, target = elements(stored, tensor), elements(wanted, tensor)
    (there,), (here,) = np.nonzero(np.isin(source, target)), np.nonzero(np.isin(target, source))
    if not there.size or np.ptp(there) >= there.size or np.ptp(here) >= here.size:
        return
    assert regions(stored, wanted) == [
        Region((there.size,), int(there[0]), (1,), int(here[0]), (1,))
    ]


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        pytest.param(
            Run((0, 0, 0), (2, 4, 6), 0, 48),
            Run((0, 0, 2), (2, 4, 3), 0, 24),
            [Region((8, 3), 2, (6, 1), 0, (3, 1))],
            id="columns of all layers: two axes, not three",
        ),
        pytest.param(
            Run((0, 2), (4, 3), 0, 12),
            Run((0, 0), (4, 6), 0, 24),
            [Region((4, 3), 0, (3, 1), 2, (6, 1))],
            id="into columns",
        ),
        # Behind the rest of a row, the source has the next row and the target has a gap.
        pytest.param(
            Run((0, 0), (2, 3), 1, 6),
            Run((0, 0), (2, 6), 0, 12),
            [Region((2,), 0, (1,), 1, (1,)), Region((3,), 2, (1,), 6, (1,))],
            id="rows that are adjacent on one side",
        ),
    ],
)
def test_a_region_has_no_more_axes_than_it_needs(stored, wanted, expected):
    assert regions(stored, wanted) == expected
