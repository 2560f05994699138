"""Check before the first step that the slabs of all ranks of a node fit into its memory together.

Each slab may fit alone, but all ranks of a node allocate at the same time. Without this check the
kernel kills processes, or saves fail for the rest of the run. A slab must also respect the limits
of its own process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import platform
from collections.abc import Sequence

from megatron_flashckpt.agent.place import place_of
from megatron_flashckpt.agent.run_messages import BeginRun
from megatron_flashckpt.collectives import run_and_gather
from megatron_flashckpt.errors import FlashCkptError, StorageError
from megatron_flashckpt.megatron_lm.size_estimate import SizeEstimate
from megatron_flashckpt.memory.host_memory import Limit, ProcessLimit, limits, process_limits, shown
from megatron_flashckpt.memory.pinned_slab import unlock_closed
from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.new_slab import slab_nbytes

#: Longest wait until agents have written and freed the memory of an earlier run, in seconds.
_RELEASE_S = 60.0
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
    nbytes: int
    held_nbytes: int
    """The part of `nbytes` that the node holds for ranks of other nodes."""
    left_nbytes: int
    """Bytes that the limit leaves: the smallest value that one of the ranks has read."""
    holders: tuple[str, ...]

    @property
    def missing_nbytes(self) -> int:
        """Bytes needed beyond the limit; negative if memory remains."""
        return self.nbytes - self.left_nbytes


def check_memory(checkpointer: Checkpointer, expected: SizeEstimate) -> list[Need]:
    """Check that all nodes have the memory; return each rank's need, in rank order. Collective.

    An agent may still hold memory for ranks of an earlier run that this run does not have. The
    agents learn here which ranks this run has, and get time to free the rest.

    Raises:
        StorageError: as `check`, on all ranks.
    """
    run_id, slots = checkpointer.runs.agree(), checkpointer.config.slots
    needs = _needs(checkpointer, expected)
    ranks = ranks_of_same_agent(needs, checkpointer.rank)
    checkpointer.link.agent.begin_run(BeginRun(run_id, ranks))
    try:
        check(needs, slots)
    except StorageError:
        needs = _needs(checkpointer, expected, checkpointer.link.agent.held_memory(_RELEASE_S))
        check(needs, slots)
    return needs


def _needs(checkpointer: Checkpointer, expected: SizeEstimate, holder: str = "") -> list[Need]:
    """Return the need of each rank, in rank order. Collective."""
    config, link = checkpointer.config, checkpointer.link
    with contextlib.suppress(FlashCkptError):  # the first save reports the same error
        link.reclaim()
    unlock_closed()
    slab = slab_nbytes(config.slots, expected.nbytes, expected.plan_nbytes)

    def own() -> tuple[None, Need]:
        return None, Need(
            platform.node(),
            slab,
            int(slab * config.held_share),
            link.has_slab,
            tuple(limits()),
            tuple(process_limits()),
            str(place_of(checkpointer.root, config.runtime_dir)),
            holder,
        )

    return run_and_gather(own)[1]


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
            nbytes=sum(needs[rank].nbytes for rank, _ in group if new[rank]),
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
