"""Processes of one rank: which of them the agent serves.

A rank may be started a second time while its first process lives: a job is submitted twice, or
torchrun is killed and its ranks live on. Both processes must never write into one slab, because a
mixture of both would be committed. The agent serves the process that was started last.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_flashckpt.agent import frames
from megatron_flashckpt.agent.socket_dir import SECOND_STARTS

logger = logging.getLogger(__name__)


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


_Entry = tuple[int, RankProcess | None, list[RankProcess]]
"""Rank, the process of it that is served, and its former processes."""


def process_of(connection: socket.socket) -> RankProcess | None:
    """Return the process at the other end; None if it lives in a pid namespace unseen from here."""
    return process_with(frames.peer(connection).pid)


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
        self.replaced: set[RankProcess] = set()
        """Former processes, which may still live."""

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


_ENTRIES = msgspec.json.Decoder(list[_Entry])


class SecondStarts:
    """The ranks that were started a second time, in a file for the agent that may follow.

    That agent may meet the former process first. The file is on this node and written rarely.
    """

    def __init__(self, directory: Callable[[], Path]) -> None:
        """Args: `directory`: returns where the agent lives, which may move."""
        self._directory = directory

    def read(self) -> dict[int, Incarnations]:
        """Return what an earlier agent has written, by rank; nothing if there is no such file."""
        found = {}
        try:
            encoded = (self._directory() / SECOND_STARTS).read_bytes()
            for number, served, replaced in _ENTRIES.decode(encoded):
                found[number] = Incarnations()
                found[number].served = served
                found[number].replaced = {each for each in replaced if each.is_alive}
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("former processes of ranks are not known: %s", error)
            return {}
        return found

    def write(self, ranks: Mapping[int, Incarnations]) -> None:
        """Write down all ranks that have former processes. Never raises."""
        told = [
            (number, each.served, sorted(each.replaced))
            for number, each in sorted(ranks.items())
            if each.replaced
        ]
        path = self._directory() / SECOND_STARTS
        try:
            draft = path.with_suffix(".tmp")
            draft.write_bytes(msgspec.json.encode(told))
            draft.replace(path)
        except OSError as error:
            logger.warning("the next agent will not know the former processes: %s", error)


class ReplacedError(Exception):
    """The agent serves a later process of the same rank."""

    def __init__(self, served: RankProcess | None) -> None:
        later = "a later process" if served is None else f"process {served.pid}"
        super().__init__(
            f"{later} of the same rank on this node has taken this one's place, because the job "
            "was started a second time; this process saves nothing any more: end it"
        )
