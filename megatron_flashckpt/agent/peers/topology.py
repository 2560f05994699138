"""The assignment of holders to nodes: copies on the ring neighbour, or parity within a group.

One scheme covers both. A node cuts each rank's checkpoint into as many equal parts as it has
holders, and gives each holder one part. A holder keeps the exclusive or of the parts from its
contributors. With one contributor that is a plain copy. In a group of n nodes, each node holds for
the n - 1 others a parity of 1/(n - 1) of a checkpoint. Any one node can be rebuilt from the slots
and the parity of the others: the XOR scheme of SCR (A. Moody et al., "Design, Modeling, and
Evaluation of a Scalable Multi-level Checkpointing System", SC 2010), which rotates the parity over
the nodes as RAID 5 does.

Ranks are matched by position: the k-th rank of a node with the k-th ranks of the others. The ranks
whose parts a holder combines form a parity group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

#: A parity group: the ranks, ascending by node, whose parts one holder combines.
ParityGroup = tuple[int, ...]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One rank's contribution to a parity group: part `index` of `count` of its checkpoint."""

    parity_group: ParityGroup
    index: int
    count: int

    def bounds(self, nbytes: int) -> tuple[int, int]:
        """Return start and end of the part in a checkpoint of `nbytes`."""
        step = -(-nbytes // self.count)
        return min(self.index * step, nbytes), min((self.index + 1) * step, nbytes)


class Share(NamedTuple):
    """The part of one rank's checkpoint that a node sends to one holder."""

    holder: int
    part: Part


class Topology:
    """Holders and contributors of each node of a job.

    `copy`: the next node of the ring. `xor`: all other nodes of the group. Groups are consecutive
    and have at least `group` nodes (fewer only if the job has fewer). So a node holds at most
    1/(group - 1) of the size of its own checkpoints.
    """

    def __init__(self, scheme: str, group: int, ranks: Sequence[Sequence[int]]) -> None:
        """Divide the nodes into groups.

        Args:
            ranks: the ranks of each node, ascending.
        """
        self._ranks = ranks
        self._groups: list[range] = []
        count = len(ranks)
        if scheme == "xor":
            groups = max(1, count // group)
            edges = [count * n // groups for n in range(groups + 1)]
            self._groups = [range(*pair) for pair in itertools.pairwise(edges)]

    def holders(self, node: int) -> list[int]:
        """Return the nodes that hold parts of `node`."""
        if not self._groups:
            following = (node + 1) % len(self._ranks)
            return [following] if following != node else []
        return [other for other in self._group(node) if other != node]

    def contributors(self, node: int) -> list[int]:
        """Return the nodes whose parts `node` holds."""
        if not self._groups:
            before = (node - 1) % len(self._ranks)
            return [before] if before != node else []
        return self.holders(node)

    def _group(self, node: int) -> range:
        return next(group for group in self._groups if node in group)

    def parity_groups(self, holder: int) -> list[ParityGroup]:
        """Return the parity groups that `holder` holds."""
        contributors = self.contributors(holder)
        width = max((len(self._ranks[node]) for node in contributors), default=0)
        return [
            tuple(self._ranks[node][k] for node in contributors if k < len(self._ranks[node]))
            for k in range(width)
        ]

    def shares(self, node: int) -> dict[int, list[Share]]:
        """Return the parts that `node` sends, with their holders, by rank."""
        holders = self.holders(node)
        return {
            rank: [
                Share(holder, Part(self.parity_groups(holder)[k], index, len(holders)))
                for index, holder in enumerate(holders)
            ]
            for k, rank in enumerate(self._ranks[node])
        }
