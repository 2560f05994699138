"""Placement of copies: other nodes hold every byte of every rank, and any one node can be lost."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flashckpt.agent.peers.topology import Part, Topology

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=20)


def ranks_of(sizes: list[int]) -> list[tuple[int, ...]]:
    firsts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [tuple(range(f, f + size)) for f, size in zip(firsts, sizes, strict=True)]


@settings(max_examples=200, deadline=None)
@given(SIZES, st.sampled_from(["copy", "xor"]), st.integers(2, 9), st.integers(0, 10_000))
def test_other_nodes_hold_every_byte_and_any_one_node_may_be_lost(
    sizes: list[int], scheme: str, group: int, nbytes: int
) -> None:
    ranks = ranks_of(sizes)
    topology = Topology(scheme, group, ranks)
    home = {rank: node for node, node_ranks in enumerate(ranks) for rank in node_ranks}
    for node in range(len(sizes)):
        for rank, shares in topology.shares(node).items():
            assert (shares == []) == (len(sizes) == 1)
            covered = [share.part.bounds(nbytes) for share in shares]
            assert all(one[1] == next_[0] for one, next_ in itertools.pairwise(covered))
            if shares:
                assert (covered[0][0], covered[-1][1]) == (0, nbytes)
            for share in shares:
                assert share.holder != node
                assert share.part.parity_group in topology.parity_groups(share.holder)
                # The other contributions live neither on the lost node nor on the holder.
                others = {home[other] for other in share.part.parity_group if other != rank}
                assert not others & {node, share.holder}


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(2, 9))
def test_parity_takes_no_more_memory_than_the_group_size_promises(
    sizes: list[int], group: int
) -> None:
    ranks = ranks_of(sizes)
    topology = Topology("xor", group, ranks)
    for node in range(len(sizes)):
        holders = topology.holders(node)
        assert len(holders) + 1 >= min(group, len(sizes))
        assert len(holders) + 1 < 2 * group or len(sizes) < group
        assert topology.contributors(node) == holders
        for other in holders:
            assert node in topology.holders(other)


def test_a_copy_goes_to_the_next_node_of_the_ring() -> None:
    topology = Topology("copy", 8, [(0, 1), (2, 3), (4, 5)])
    assert [topology.holders(node) for node in range(3)] == [[1], [2], [0]]
    assert topology.shares(2) == {4: [(0, Part((4,), 0, 1))], 5: [(0, Part((5,), 0, 1))]}


def test_parity_is_rotated_over_the_nodes_of_a_group() -> None:
    topology = Topology("xor", 3, [(0,), (1,), (2,)])
    assert topology.shares(0) == {0: [(1, Part((0, 2), 0, 2)), (2, Part((0, 1), 1, 2))]}
    assert topology.shares(1) == {1: [(0, Part((1, 2), 0, 2)), (2, Part((0, 1), 1, 2))]}
    assert topology.shares(2) == {2: [(0, Part((1, 2), 0, 2)), (1, Part((0, 2), 1, 2))]}
