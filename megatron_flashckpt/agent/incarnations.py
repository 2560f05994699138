"""Processes of one rank, and the choice of the one that the agent serves.

A rank may be started a second time while its first process runs: a job is submitted twice, or
torchrun is killed and its ranks continue. Two processes must never write into one slab, because a
mixture of both would be committed. The agent serves the process that was started last.

Another agent does not know which processes were replaced. There, an earlier process is served until
the later one connects. It writes to its own slab, and its run was overtaken, so it commits nothing.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple

from megatron_flashckpt.agent import frames


class RankProcess(NamedTuple):
    """A process on this machine. Processes are ordered by start time."""

    started: int
    """Clock ticks since the machine was booted; distinguishes processes with the same pid."""
    pid: int

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs; a zombie does not run."""
        state, started = _state_of(self.pid)
        return state not in ("", "Z", "X") and started == self.started


def process_of(connection: socket.socket) -> RankProcess | None:
    """Return the process at the other end; None if its pid namespace is not visible here."""
    return process_with(frames.peer(connection).pid)


def process_with(pid: int) -> RankProcess | None:
    """Return the process that has `pid`; None if there is none."""
    state, started = _state_of(pid) if pid > 0 else ("", 0)
    return RankProcess(started, pid) if state else None


def _state_of(pid: int) -> tuple[str, int]:
    """Return the state and the start time of a process; an empty state if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="surrogateescape")
    except OSError:
        return "", 0
    # The program's name, in parentheses, may contain any character.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


class Incarnations:
    """Processes of one rank that have connected. The caller holds the node's lock."""

    def __init__(self) -> None:
        self.served: RankProcess | None = None
        self.replaced: set[RankProcess] = set()
        """Former processes, which may still run."""

    def greet(self, process: RankProcess | None, *, left: bool) -> RankProcess | None:
        """Serve `process` from now on; return the former process if it still runs.

        Args:
            left: the former process has reported that it ends as planned.

        Raises:
            ReplacedError: the agent serves a process of this rank that was started later.
        """
        served = self.served
        if process is None or process == served:
            self.served = process
            return None
        if process in self.replaced:
            raise ReplacedError(served)
        former = served if served is not None and not left and served.is_alive else None
        if former is not None and former > process:
            self.replaced.add(process)
            raise ReplacedError(former)
        self.replaced = {other for other in self.replaced if other.is_alive}
        if former is not None:
            self.replaced.add(former)
        self.served = process
        return former


class ReplacedError(Exception):
    """The agent serves a later process of the same rank."""

    def __init__(self, served: RankProcess | None) -> None:
        later = "a later process" if served is None else f"process {served.pid}"
        super().__init__(
            f"{later} of the same rank on this node has replaced this process, because the job was "
            "started a second time; this process no longer saves: end it"
        )
