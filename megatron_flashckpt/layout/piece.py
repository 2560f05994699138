"""What one rank holds of one global tensor.

Two coordinate systems meet here. A *box* (offset + shape) is an axis-aligned region of the global
tensor: what tensor, pipeline and expert parallelism cut out. A half-open range `[start, end)` of
the row-major flattening of that box is what the distributed optimizer cuts out of it. A piece is
a box with a range.
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

#: Ends the key of a parameter that no forward uses and that other parallel layouts do not have. A
#: load may lack such a tensor, and may leave it unread. No name of a parameter has a space.
UNUSED = " (unused)"

Shape = tuple[int, ...]


# `gc=False` here, and where there are as many: no cycle can go through them, and the garbage
# collector made the decoding of 20,000 take 2.5 times as long.
class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A contiguous run of one box of one global tensor.

    `kind` is `weight`, `master`, `buffer`, `rank_state`, or the optimizer's own name of a state
    (`exp_avg`, `exp_avg_sq`, `momentum_buffer`, ...).
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

    @property
    def box(self) -> tuple[str, str, Shape, Shape]:
        """Identity of the box: pieces that share it differ in their range only."""
        return (self.key, self.kind, self.offset, self.shape)

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

    The tensors are laid end to end and cut into `count` equal byte shares; a cut inside an element
    moves up to its end. All replicas compute the same cuts, so they agree without talking.

    Args:
        sizes: `(numel, itemsize)` of each tensor, in the order that all replicas share.

    Returns:
        One half-open `(start, end)` per tensor; empty ranges where the share has none of it.
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
    """Return the indices of `count` replicas, ascending; no node has two more of them than another.

    If a node has too few replicas for that, all of its replicas are among them. All replicas of a
    group compute the same indices, so they agree without talking.

    Args:
        nodes: the node of each replica of the group.
        turn: number of the group. Groups on the same nodes begin at different ones, so that the
            nodes have equal work between them.
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
