"""Pieces: boxes stay inside tensors, ranges inside boxes, and replicas have equal shares."""

from __future__ import annotations

import collections
import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_flashckpt.errors import LayoutError
from megatron_flashckpt.layout.dtypes import ITEMSIZE
from megatron_flashckpt.layout.piece import Piece, equal_shares, spread_over_nodes
from tests.support.strategies import pieces

PIECE = Piece("w", "weight", "BF16", (8, 6), (2, 3), (4, 2), 1, 7)

sizes = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(sorted(set(ITEMSIZE.values())))), max_size=8
)
counts = st.integers(1, 9)


def shares(tensors: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    return [equal_shares(tensors, count, index) for index in range(count)]


@given(sizes, counts)
def test_equal_shares_cover_every_element_once(tensors, count):
    begun = [0] * len(tensors)
    for share in shares(tensors, count):
        assert [start for start, _ in share] == begun
        begun = [end for _, end in share]
        assert all(start <= end for start, end in share)
    assert begun == [numel for numel, _ in tensors]


@given(sizes, counts)
@example([(2, 8), (11, 1)], 3)  # 16, 2 and 9 bytes: the most uneven shares
def test_every_share_differs_from_the_mean_by_less_than_one_element(tensors, count):
    widths = [size for _, size in tensors]
    total = sum(numel * size for numel, size in tensors)
    for share in shares(tensors, count):
        nbytes = sum((end - start) * size for (start, end), size in zip(share, widths, strict=True))
        assert abs(nbytes - total / count) < max(widths, default=1)


@pytest.mark.parametrize(("count", "index"), [(2, 2), (2, -1), (0, 0)])
def test_a_replica_outside_its_group_is_refused(count, index):
    with pytest.raises(LayoutError, match=rf"replica {index} of {count} does not exist"):
        equal_shares([(4, 4)], count, index)


@given(pieces())
def test_a_box_inside_its_tensor_with_a_range_inside_the_box_is_accepted(piece):
    piece.check()
    assert piece.numel == piece.end - piece.start <= math.prod(piece.shape)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"global_shape": (8,)}, "differ in length"),
        ({"offset": (2, 3, 0)}, "differ in length"),
        ({"shape": (8,)}, "differ in length"),
        ({"offset": (5, 3)}, "leaves the global shape"),
        ({"offset": (-1, 3)}, "leaves the global shape"),
        ({"shape": (4, 4)}, "leaves the global shape"),
        ({"shape": (-4, -2)}, "leaves the global shape"),
        ({"end": 9}, "leaves the box"),
        ({"start": -1}, "leaves the box"),
        ({"start": 7, "end": 1}, "leaves the box"),
        ({"dtype": "F12"}, "'F12' cannot be stored; known: F64"),
    ],
)
def test_an_inconsistent_piece_is_refused(change, complaint):
    with pytest.raises(LayoutError, match=complaint):
        msgspec.structs.replace(PIECE, **change).check()


@given(
    nodes=st.lists(st.integers(0, 5), min_size=1, max_size=24),
    count=st.integers(1, 30),
    turn=st.integers(0, 100),
)
def test_writers_are_spread_evenly_over_the_nodes_of_their_replicas(nodes, count, turn):
    writers = spread_over_nodes(nodes, count, turn)
    assert writers == sorted(set(writers))
    assert len(writers) == min(count, len(nodes))
    of_node = collections.Counter(nodes[writer] for writer in writers)
    most = max(of_node.values())
    for node, replicas in collections.Counter(nodes).items():
        assert of_node[node] >= min(replicas, most - 1)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_groups_on_the_same_nodes_give_all_nodes_equal_work(count):
    """With TP8 on 4 nodes, every group has a replica on each node."""
    nodes = range(4)
    of_node = collections.Counter(
        writer for group in range(8) for writer in spread_over_nodes(nodes, count, group)
    )
    assert [of_node[node] for node in nodes] == [8 * min(count, 4) // 4] * 4
