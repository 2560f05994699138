"""Check before the first step that the slabs of all ranks of a node fit into its memory together.

Each slab may fit alone, but all ranks of a node allocate at the same time. Without this check the
kernel kills processes, or saves fail for the rest of the run. A slab must also respect the limits
of its own process.
"""

from __future__ import annotations

import dataclasses
import errno
import platform
from collections.abc import Sequence

from megatron_flashckpt.collectives import run_and_gather
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.memory.host_memory import Limit, ProcessLimit, limits, process_limits, shown

#: Upper bound of the lines that an error lists.
_MOST_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Need:
    """Host memory that one rank uses on its node, and the limits on that memory."""

    host: str
    slab_nbytes: int
    held_nbytes: int
    """Bytes that the node holds for a rank of another node."""
    is_there: bool
    """True after a restart: the agent has kept the slab, so no slab will be allocated."""
    limits: tuple[Limit, ...]
    process_limits: tuple[ProcessLimit, ...] = ()
    agent: str = ""
    """Socket of the agent of this rank; ranks of one host may have several agents."""
    holder: str = ""
    """Memory that the agent holds already, and for which ranks; empty if unknown."""

    @property
    def nbytes(self) -> int:
        return self.slab_nbytes + self.held_nbytes


@dataclasses.dataclass(frozen=True)
class SharedLimit:
    """Memory that several ranks together will allocate under one limit."""

    host: str
    place: str
    ranks: tuple[int, ...]
    slab_nbytes: int
    held_nbytes: int
    left_nbytes: int
    """Bytes that the limit leaves: the smallest value that one of the ranks has read."""
    holders: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.slab_nbytes + self.held_nbytes

    @property
    def missing_nbytes(self) -> int:
        """Bytes needed beyond the limit; negative if memory remains."""
        return self.nbytes - self.left_nbytes


def gather_needs(
    slab_nbytes: int, held_nbytes: int, *, is_there: bool, agent: str = "", holder: str = ""
) -> list[Need]:
    """Return the needs of all ranks, in rank order. Collective.

    Args:
        slab_nbytes: size of this rank's slab.
        held_nbytes: bytes that this rank's node holds for a rank of another node (`redundancy`).
        is_there: True if the agent has kept that memory over a restart.
        agent: socket of this rank's agent.
        holder: memory that the agent holds already, and for which ranks.
    """

    def measure() -> tuple[None, Need]:
        bounds = tuple(limits()), tuple(process_limits())
        sizes = (slab_nbytes, held_nbytes, is_there)
        return None, Need(platform.node(), *sizes, *bounds, agent, holder)

    return run_and_gather(measure)[1]


def ranks_of_same_agent(needs: Sequence[Need], rank: int) -> tuple[int, ...]:
    """Return the ranks that have the same agent as `rank`."""
    place = (needs[rank].host, needs[rank].agent)
    return tuple(other for other, need in enumerate(needs) if (need.host, need.agent) == place)


def check(needs: Sequence[Need], slots: int) -> None:
    """Check that the ranks of every node need no more memory than the node has left.

    Raises:
        StorageError: lists the nodes without enough memory, with the bytes needed and left; or the
            ranks whose process limits forbid a slab of its size. Equal on all ranks.
    """
    _check_processes(needs, slots)
    short = [shared for shared in by_limit(needs) if shared.nbytes and shared.missing_nbytes > 0]
    # Several limits may bound the same ranks: show the tightest one.
    worst: dict[tuple[int, ...], SharedLimit] = {}
    for shared in sorted(short, key=lambda shared: shared.missing_nbytes):
        worst[shared.ranks] = shared
    if not worst:
        return
    lines = [_refusal(shared) for _, shared in sorted(worst.items())]
    raise StorageError(
        errno.ENOMEM,
        f"{_slots(slots)} of each rank {'do' if slots > 1 else 'does'} not fit into host memory, "
        f"so saves would fail or the kernel would kill processes:\n  {_listed(lines)}\nfree "
        f"memory on these nodes, {_fewer(slots)}use more nodes, or raise the memory limit of "
        "the job's pod or batch job",
    )


def _check_processes(needs: Sequence[Need], slots: int) -> None:
    lines = [
        f"{need.host}: rank {rank} needs {shown(need.slab_nbytes)} in one piece; its {limit.name} "
        f"leaves {shown(limit.left_nbytes)}"
        for rank, need in enumerate(needs)
        for limit in need.process_limits
        if not need.is_there and need.slab_nbytes > limit.left_nbytes
    ]
    if lines:
        raise StorageError(
            errno.EFBIG,
            f"{_slots(slots)} of a rank exceed{'' if slots > 1 else 's'} a limit of its process, "
            f"so every save would fail:\n  {_listed(lines)}\nraise that limit where the job is "
            f"started, {_fewer(slots)}or use more ranks",
        )


def _slots(number: int) -> str:
    return f"the {number} checkpoint slots" if number > 1 else "the checkpoint slot"


def _fewer(slots: int) -> str:
    """Return a remedy for jobs with several slots."""
    return "lower 'slots', " if slots > 1 else ""


def _listed(lines: list[str]) -> str:
    if len(lines) > _MOST_SHOWN:
        lines = [*lines[:_MOST_SHOWN], f"and {len(lines) - _MOST_SHOWN} more"]
    return "\n  ".join(lines)


def by_limit(needs: Sequence[Need]) -> list[SharedLimit]:
    """Return, for each limit, the memory that all ranks under the limit will allocate together."""
    bounded: dict[str, list[tuple[int, Limit]]] = {}
    new = [not need.is_there for need in needs]
    for rank, need in enumerate(needs):
        for limit in need.limits:
            bounded.setdefault(limit.key, []).append((rank, limit))
    return [
        SharedLimit(
            host=needs[group[0][0]].host,
            place=group[0][1].place,
            ranks=tuple(rank for rank, _ in group),
            slab_nbytes=sum(needs[rank].slab_nbytes for rank, _ in group if new[rank]),
            held_nbytes=sum(needs[rank].held_nbytes for rank, _ in group if new[rank]),
            left_nbytes=max(0, min(limit.left_nbytes for _, limit in group)),
            holders=tuple(sorted({needs[rank].holder for rank, _ in group} - {""})),
        )
        for group in bounded.values()
    ]


def tightest_limit(needs: Sequence[Need], rank: int) -> SharedLimit:
    """Return the memory under the tightest limit that bounds `rank`."""
    return max(
        (shared for shared in by_limit(needs) if rank in shared.ranks),
        key=lambda shared: shared.missing_nbytes,
    )


def _refusal(shared: SharedLimit) -> str:
    first, last = shared.ranks[0], shared.ranks[-1]
    needing = f"{len(shared.ranks)} ranks ({first} to {last}) need"
    if first == last:
        needing = f"rank {first} needs"
    held = f", {shown(shared.held_nbytes)} of it for other nodes" if shared.held_nbytes else ""
    lines = [
        f"{shared.host}: {needing} {shown(shared.nbytes)}{held}; {shared.place} has "
        f"{shown(shared.left_nbytes)} left",
        *shared.holders,
    ]
    return "; ".join(lines)
