"""Processes of one rank: which of them the agent serves.

A rank may be started a second time while its first process lives: a job is submitted twice, or
torchrun is killed and its ranks live on. Both processes must never write into one slab, because a
mixture of both would be committed. The agent serves the process that was started last.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple

from megatron_flashckpt.agent import protocol as p


class RankProcess(NamedTuple):
    """A process on this machine. The one that was started later is greater."""

    started: int
    """In clock ticks since the machine was booted, so that a reused pid is told apart."""
    pid: int

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs; a zombie does not."""
        state, started = _state_of(self.pid)
        return state not in ("", "Z", "X") and started == self.started


def process_of(connection: socket.socket) -> RankProcess | None:
    """Return the process at the other end; None if it lives in a pid namespace unseen from here."""
    return process_with(p.peer(connection).pid)


def process_with(pid: int) -> RankProcess | None:
    """Return the process that has `pid`; None if there is none."""
    state, started = _state_of(pid) if pid > 0 else ("", 0)
    return RankProcess(started, pid) if state else None


def _state_of(pid: int) -> tuple[str, int]:
    """Return the state and the start time of a process; an empty state if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    # The name of the program, in parentheses, may contain anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


class Incarnations:
    """The processes of one rank that the agent has met. The caller holds the node's lock."""

    def __init__(self) -> None:
        self.served: RankProcess | None = None
        self._replaced: set[RankProcess] = set()

    def greet(self, process: RankProcess | None, *, left: bool) -> RankProcess | None:
        """Serve `process` from now on; return the former process if that still lives.

        Args:
            left: the former process has said that it ends as planned.

        Raises:
            ReplacedError: a process of the rank that was started later is served.
        """
        served = self.served
        if process is None or process == served:
            self.served = process
            return None
        if process in self._replaced:
            raise ReplacedError(served)
        former = served if served is not None and not left and served.is_alive else None
        if former is not None and former > process:
            self._replaced.add(process)
            raise ReplacedError(former)
        self._replaced = {other for other in self._replaced if other.is_alive}
        if former is not None:
            self._replaced.add(former)
        self.served = process
        return former


class ReplacedError(Exception):
    """The agent serves a later process of the same rank."""

    def __init__(self, served: RankProcess | None) -> None:
        later = "a later process" if served is None else f"process {served.pid}"
        super().__init__(
            f"{later} of the same rank on this node has taken this one's place, because the job "
            "was started a second time; this process saves nothing any more: end it"
        )
