"""Settings of the section `agent`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

#: Largest value of a setting. An infinite wait would look like a job that hangs; the bound also
#: refuses NaN.
MOST = 10**9

Count = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST)]
#: Seconds to wait for an answer, which always takes some time.
Patience = Annotated[float, msgspec.Meta(ge=0.1, le=MOST)]


class SentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of the section `agent` that every run sends to the agents; see `agent.settings`."""

    grace_s: Seconds = 600.0
    """Seconds that an agent without trainers keeps its slots for a restart before it exits."""

    keep_unwritten_s: Seconds = 14400.0
    """Seconds that an agent without trainers keeps a checkpoint that could not be written, if
    storage has no newer one. The agent tries again every minute, and a job that starts meanwhile
    resumes from it. 0: the agent tries once. See `persist_on_leave`."""

    persist_threads: Count = 2
    """Slots that a node writes at the same time."""

    write_threads: Count = 4
    """Chunks (4 MiB each) of one slot that are digested and written at the same time."""

    write_mib_per_s: Annotated[float, msgspec.Meta(ge=1, le=MOST)] | None = None
    """Rate limit for the writes of all ranks of a node to storage, MiB/s. `None`: no limit. An
    agent that has received SIGTERM ignores the limit."""

    writer_nice: CountOrZero = 5
    """Niceness of the writing threads relative to training, 0 to 19: lower CPU priority, and lower
    I/O priority where the device's scheduler supports that. If the kernel first divides CPUs
    between sessions (`kernel.sched_autogroup_enabled`), it has effect only within the agent."""

    session_nice: CountOrZero = 0
    """Niceness of the whole agent where the kernel first divides CPUs between sessions, 0 to 19. A
    positive value delays the agent's answers while it writes and all CPUs are busy: with 5 they
    take 14 ms instead of 7 ms, several times per save."""

    cpus: str | int = "all"
    """CPUs that the agent runs on: `all` of its cpuset; `inherit` those of the rank that starts it;
    or a list as for taskset, e.g. `0-3,8`. `all` means `inherit` if Slurm gave the job fewer CPUs
    than its cpuset has."""

    direct_io: Literal["auto", "always", "never"] = "auto"
    """Writes that bypass the page cache (O_DIRECT). `always`: wherever the file system supports
    them. `never`: nowhere. `auto`: where they are supported and the first chunks are not slower."""

    commit_timeout_s: Annotated[float, msgspec.Meta(ge=1, le=MOST)] = 1800.0
    """Seconds from the first staged shard until a save counts as failed if it is not committed:
    shards of other nodes are missing, or the storage hangs."""

    slow_save_s: Seconds = 300.0
    """Seconds after which the log reports that a save is not durable yet, and why. Rank 0 logs it,
    and the first rank of each node whose shard is still being written."""

    log_in_save_directory: bool = False
    """Also write the agent's log to `flashckpt-agent-<host>.log` in the save directory, where it
    outlives the node; at 4 MiB it moves to `<file>.1`."""

    sigterm_timeout_s: Seconds = 120.0
    """Seconds that an agent has after SIGTERM to write staged checkpoints, and trainers to make
    their last save. A second SIGTERM ends the agent at once."""

    persist_on_leave: bool = True
    """Write the newest checkpoint before the agent exits, if that is only in memory. This is the
    case if no trainer came back within `grace_s`, or if the job's last save was memory-only or
    failed. `keep_unwritten_s` limits the attempts. `false`: the checkpoint is freed unwritten."""

    on_durable: str | None = None
    """Shell command that the agent of rank 0 runs after each checkpoint has become durable, one at
    a time, and again after a crash. It finds `DURABLE_PATH` (directory or URL of the checkpoint),
    `DURABLE_ROOT` (the save directory), `DURABLE_ITERATION`, `DURABLE_SAVE` and `DURABLE_METRICS`
    (JSON) in its environment, which else is the agent's (see `environment`). Retention spares the
    checkpoint until the command has ended once."""

    on_durable_timeout_s: Annotated[float, msgspec.Meta(ge=1, le=MOST)] = 3600.0
    """Seconds after which `on_durable` is ended. Then, and after an exit status other than 0, it is
    tried again two times; training and saves do not wait for it."""


class AgentConfig(SentConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Background process of a node."""

    start_timeout_s: Patience = 30.0
    """Seconds that a rank waits for the first answer of its agent. An agent that alone holds the
    checkpoint of dead ranks gets ten times as long for any answer, before it is killed."""

    answer_timeout_s: Patience = 10.0
    """Seconds without an answer after which an agent counts as hung, and is killed and replaced."""

    environment: tuple[str, ...] = ()
    """Environment variables that the agent receives in addition to those for paths, languages,
    Python, Slurm and `FLASHCKPT_*`. `*` matches any characters: `[LD_PRELOAD, MY_*]`."""

    address: str | None = None
    """Address under which other nodes' agents reach this node; used with `redundancy` only.
    `None`: the address of the interface that leads to the job's rendezvous (`MASTER_ADDR`)."""

    peer_timeout_s: Patience = 20.0
    """Seconds without an answer after which another node's agent counts as gone."""

    peer_threads: Count = 2
    """Streams to each node that holds redundancy for this one, and threads that encrypt and
    decrypt: about 0.5 GB/s each."""
