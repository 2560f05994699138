"""The part of one global tensor that one rank holds.

A piece is a *box* with a *range*. A box (offset + shape) is an axis-aligned region of the global
tensor; tensor, pipeline and expert parallelism shard tensors into boxes. A range is half-open,
`[start, end)`, and counts elements of the row-major flattened box; the distributed optimizer
shards a box into ranges.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import msgspec

from megatron_flashckpt.errors import LayoutError
from megatron_flashckpt.layout.dtypes import itemsize

WEIGHT = "weight"
MASTER = "master"
BUFFER = "buffer"
#: Serialised per-rank state (RNG, param groups, ...): bytes, one piece per rank.
RANK_STATE = "rank_state"

#: Suffix of the key of a parameter that no forward pass uses and that other parallel layouts do not
#: have. A load accepts that such a tensor is missing or unread. No parameter name has a space.
UNUSED = " (unused)"

Shape = tuple[int, ...]


# `gc=False` here and for other numerous structs: they cannot be part of a reference cycle, and the
# garbage collector made decoding 20,000 of them 2.5 times as slow.
class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A contiguous run of one box of one global tensor.

    `kind` is `weight`, `master`, `buffer`, `rank_state`, or the optimizer's name for a state
    tensor (`exp_avg`, `exp_avg_sq`, `momentum_buffer`, ...).
    """

    key: str
    kind: str
    dtype: str
    global_shape: Shape
    offset: Shape
    shape: Shape
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)

    def check(self) -> None:
        """Raise LayoutError unless the box lies in the global tensor and the range in the box."""
        if not len(self.global_shape) == len(self.offset) == len(self.shape):
            raise LayoutError(f"{self}: global shape, offset and shape differ in length")
        for size, low, extent in zip(self.global_shape, self.offset, self.shape, strict=True):
            if low < 0 or extent < 0 or low + extent > size:
                raise LayoutError(f"{self}: box leaves the global shape {self.global_shape}")
        if not 0 <= self.start <= self.end <= math.prod(self.shape):
            raise LayoutError(f"{self}: range [{self.start}, {self.end}) leaves the box")
        itemsize(self.dtype)


def equal_shares(sizes: Sequence[tuple[int, int]], count: int, index: int) -> list[tuple[int, int]]:
    """Return the element range of each tensor that replica `index` of `count` writes.

    The tensors are laid end to end and divided into `count` equal byte shares; a boundary inside an
    element moves to the end of that element. All replicas compute the same boundaries, so they
    agree without communication.

    Args:
        sizes: `(numel, itemsize)` of each tensor, in an order that is equal on all replicas.

    Returns:
        One half-open `(start, end)` per tensor; an empty range if the share excludes the tensor.
    """
    if not 0 <= index < count:
        raise LayoutError(f"replica {index} of {count} does not exist")
    total = sum(numel * size for numel, size in sizes)
    low, high = total * index // count, total * (index + 1) // count
    ranges = []
    base = 0
    for numel, size in sizes:
        start = min(max(-(-(low - base) // size), 0), numel)
        end = min(max(-(-(high - base) // size), 0), numel)
        ranges.append((start, end))
        base += numel * size
    return ranges


def spread_over_nodes(nodes: Sequence[Hashable], count: int, turn: int) -> list[int]:
    """Return the ascending indices of `count` replicas, spread evenly over their nodes.

    The numbers of chosen replicas of two nodes differ by at most one, except that a node with too
    few replicas gives all of them. All replicas of a group compute the same indices, so they agree
    without communication.

    Args:
        nodes: the node of each replica of the group.
        turn: number of the group. Groups on the same nodes start at different nodes, which
            balances the work of the nodes.
    """
    replicas: dict[Hashable, list[int]] = {}
    for index, node in enumerate(nodes):
        replicas.setdefault(node, []).append(index)
    queues = list(replicas.values())
    first = turn * count % len(queues)
    queues = queues[first:] + queues[:first]
    rounds = range(max(map(len, queues)))
    ordered = [queue[n] for n in rounds for queue in queues if n < len(queue)]
    return sorted(ordered[:count])
