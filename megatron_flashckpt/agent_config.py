"""The settings of the section `agent`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

#: No setting is larger: an infinite wait looks like a job that hangs, and no bound stops a NaN.
MOST = 10**9

Count = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST)]
#: Seconds without an answer: none is given at once.
Patience = Annotated[float, msgspec.Meta(ge=0.1, le=MOST)]


class SentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of the section `agent` that every run sends to the agents; see `agent.settings`."""

    grace_s: Seconds = 600.0
    """Seconds that an agent without trainers keeps its slots for a restart, then leaves."""

    persist_threads: Count = 2
    """Slots written at the same time per node."""

    write_threads: Count = 4
    """Chunks (4 MiB each) of one slot that are digested and written at the same time."""

    write_mib_per_s: Annotated[float, msgspec.Meta(ge=1, le=MOST)] | None = None
    """What all ranks of the node together write to storage, at most, MiB/s; `None`: as fast as it
    goes. Not for an agent that was told to end (SIGTERM)."""

    writer_nice: CountOrZero = 5
    """How much lower the priority (CPU, and I/O where the device's scheduler has priorities) of the
    threads that write is than that of training; at most 19. Where the kernel shares CPUs between
    sessions first (`kernel.sched_autogroup_enabled`), it counts inside the agent only."""

    session_nice: CountOrZero = 0
    """How much lower the priority of the whole agent is there; at most 19. While it writes and all
    CPUs are busy its answers are then late: with 5 after 14 ms instead of 7, in every iteration."""

    cpus: str | int = "all"
    """CPUs that the agent runs on: `all` of its cpuset; those of the rank that starts it
    (`inherit`); or a list as in taskset, `0-3,8`. `all` is `inherit` where Slurm gave the job fewer
    CPUs than its cpuset has."""

    direct_io: Literal["auto", "always", "never"] = "auto"
    """Writing past the page cache (O_DIRECT): wherever the file system can (`always`), nowhere
    (`never`), or where it can and the first chunks show that it is not slower (`auto`)."""

    commit_timeout_s: Annotated[float, msgspec.Meta(ge=1, le=MOST)] = 1800.0
    """Seconds from the first staged shard until a save that is not committed counts as failed,
    because other nodes' shards are missing or the storage hangs."""

    slow_save_s: Seconds = 300.0
    """Seconds after which the log says that a save is not durable yet, and why (rank 0, and the
    first rank of each node whose shard is still being written)."""

    sigterm_timeout_s: Seconds = 120.0
    """Seconds that an agent told to end (SIGTERM) has for what is staged, and for trainers to make
    their last save. A second SIGTERM ends it at once."""

    persist_on_leave: bool = True
    """Write the newest checkpoint if it is only in memory when the agent leaves: nobody came back
    within the grace time, or the job ended right after a save that was for memory only, or failed
    (a failed save is tried once more then: the storage may be back)."""


class AgentConfig(SentConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The background process of a node."""

    start_timeout_s: Patience = 30.0
    """Seconds that a rank waits for the agent to answer for the first time."""

    answer_timeout_s: Patience = 10.0
    """Seconds without an answer after which an agent counts as hung: it is killed and replaced."""

    environment: tuple[str, ...] = ()
    """Variables that the agent gets beyond those for paths, languages, Python, Slurm and
    `FLASHCKPT_*`; `*` stands for any characters: `[LD_PRELOAD, MY_*]`."""

    address: str | None = None
    """Address of this node that the agents of other nodes reach; used with `redundancy` only.
    `None`: the one on the way to the job's rendezvous (`MASTER_ADDR`)."""

    peer_timeout_s: Patience = 20.0
    """Seconds without an answer after which another node's agent counts as gone."""

    peer_threads: Count = 2
    """Streams to each of the nodes that hold something, and threads that encrypt and decrypt:
    about 0.5 GB/s each."""
