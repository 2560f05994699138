"""Checks before the first step that the slabs of all ranks of a node fit into its memory together.

Each rank's slab may fit alone, and all ranks allocate theirs at the same time: without this check
the kernel kills processes, or saves fail for the rest of the run.
"""

from __future__ import annotations

import dataclasses
import errno
import platform
from collections.abc import Sequence

from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.memory.available import Limit, limits
from megatron_flashckpt.restore.collectives import gathered

#: Nodes that a refusal lists.
_MOST_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Need:
    """Memory of its node that one rank uses."""

    host: str
    slab_nbytes: int
    held_nbytes: int
    """Bytes that the node holds for a rank of another node."""
    is_there: bool
    """True after a restart: the rank has its slab already, and the node what it holds."""
    limits: tuple[Limit, ...]

    @property
    def nbytes(self) -> int:
        return self.slab_nbytes + self.held_nbytes


@dataclasses.dataclass(frozen=True)
class Shared:
    """Memory that several ranks are about to take under one limit."""

    host: str
    place: str
    ranks: tuple[int, ...]
    slab_nbytes: int
    held_nbytes: int
    left_nbytes: int
    """The least that one of the ranks has seen."""

    @property
    def nbytes(self) -> int:
        return self.slab_nbytes + self.held_nbytes

    @property
    def lacking_nbytes(self) -> int:
        """Bytes that are missing; negative if there is more than enough."""
        return self.nbytes - self.left_nbytes


def gather_needs(slab_nbytes: int, held_nbytes: int, *, is_there: bool) -> list[Need]:
    """Return the needs of all ranks, in rank order. Collective.

    Args:
        slab_nbytes: what this rank's slab takes.
        held_nbytes: what this rank's node holds for one of another node, with `redundancy`.
        is_there: whether that memory has been taken already, before a restart.
    """

    def measure() -> tuple[None, Need]:
        mine = (slab_nbytes, held_nbytes, is_there)
        return None, Need(platform.node(), *mine, tuple(limits()))

    return gathered(measure)[1]


def check(needs: Sequence[Need], slots: int) -> None:
    """Raise, on all ranks alike, if the ranks of a node are about to take more than it has.

    Raises:
        StorageError: names each such node with what is needed and what is there.
    """
    short = [shared for shared in by_limit(needs) if shared.nbytes and shared.lacking_nbytes > 0]
    worst: dict[tuple[int, ...], Shared] = {}
    for shared in sorted(short, key=lambda shared: shared.lacking_nbytes):
        worst[shared.ranks] = shared
    if not worst:
        return
    lines = [_refusal(shared) for _, shared in sorted(worst.items())]
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"and {len(lines) - _MOST_SHOWN} more"]
    raise StorageError(
        errno.ENOMEM,
        f"the {slots} checkpoint slots of each rank do not fit into host memory, so saves would "
        "fail or the kernel would kill processes:\n  "
        + "\n  ".join(lines)
        + "\nfree memory on these nodes, lower 'slots', use more nodes, or raise the memory limit "
        "of the job's pod or batch job",
    )


def by_limit(needs: Sequence[Need]) -> list[Shared]:
    """Return for each limit what all ranks under it are about to take together."""
    under: dict[str, list[tuple[int, Limit]]] = {}
    new = [not need.is_there for need in needs]
    for rank, need in enumerate(needs):
        for limit in need.limits:
            under.setdefault(limit.key, []).append((rank, limit))
    return [
        Shared(
            host=needs[seen[0][0]].host,
            place=seen[0][1].place,
            ranks=tuple(rank for rank, _ in seen),
            slab_nbytes=sum(needs[rank].slab_nbytes for rank, _ in seen if new[rank]),
            held_nbytes=sum(needs[rank].held_nbytes for rank, _ in seen if new[rank]),
            left_nbytes=max(0, min(limit.left_nbytes for _, limit in seen)),
        )
        for seen in under.values()
    ]


def around(needs: Sequence[Need], rank: int) -> Shared:
    """Return the limit with the least room of those that `rank` is under."""
    return max(
        (shared for shared in by_limit(needs) if rank in shared.ranks),
        key=lambda shared: shared.lacking_nbytes,
    )


def shown(nbytes: int) -> str:
    """Return a number of bytes for people."""
    unit, name = (2**30, "GiB") if nbytes >= 2**30 else (2**20, "MiB")
    return f"{nbytes / unit:.1f} {name}"


def _refusal(shared: Shared) -> str:
    first, last = shared.ranks[0], shared.ranks[-1]
    one = f"rank {first} needs"
    who = one if first == last else f"{len(shared.ranks)} ranks ({first} to {last}) need"
    held = f", {shown(shared.held_nbytes)} of it for other nodes" if shared.held_nbytes else ""
    return (
        f"{shared.host}: {who} {shown(shared.nbytes)}{held}; {shared.place} has "
        f"{shown(shared.left_nbytes)} left"
    )
