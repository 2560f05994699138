"""Agents that a section has started, which continue to run after their trainers."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.support.trainer import agents_under, eventually, is_alive


@contextlib.contextmanager
def agents_ended(where: Path) -> Iterator[None]:
    """Kill every agent with a directory in `where` at the end of the context."""
    try:
        yield
    finally:
        end_agents(where)


def end_agents(where: Path) -> None:
    """Kill every agent with a directory in `where`; return when all have ended."""
    for pid in agents_under(where):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        eventually(f"the end of agent {pid}", lambda pid=pid: not is_alive(pid))
