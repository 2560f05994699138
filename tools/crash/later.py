"""A trainer in its own process, which starts later than others and calls methods on request.

Imports nothing of megatron_flashckpt: a forked process imports it after its environment is set.
"""

from __future__ import annotations

import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.forked.nursery import nursery, settle_in

#: Longest wait for an answer; the cell fails after it.
_PATIENCE_S = 60.0


class LaterProcess:
    """Handle of the process, for the test."""

    def __init__(self, home: Path, *arguments: Any) -> None:
        """Start a process that creates `second_starts.RankRun(*arguments)` at the first request."""
        made = nursery()
        self._connection, other = made.Pipe()
        # Imported here: the forked process imports this module before its environment is set.
        from tools.crash import trouble

        environment = trouble.environment(home / "save")
        log = home / f"later-{len(list(home.glob('later-*')))}.log"
        self._process = made.Process(
            target=_serve, args=(environment, str(log), other, *arguments), daemon=True
        )
        self._process.start()
        other.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def ask(self, name: str, *arguments: Any) -> None:
        """Request a method call; `answer` returns its result."""
        self._connection.send((name, arguments))

    def answer(self) -> Any:
        if not self._connection.poll(_PATIENCE_S):
            raise AssertionError("no answer of a later process")
        error, result = self._connection.recv()
        if error:
            raise AssertionError(f"a later process: {error}")
        return result

    def do(self, name: str, *arguments: Any) -> Any:
        self.ask(name, *arguments)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(_PATIENCE_S)
        self._connection.close()


def _serve(environment: dict[str, str], log: str, connection: Connection, *arguments: Any) -> None:
    settle_in(environment, log)
    from tools.crash.second_starts import RankRun
    from tools.crash.trouble import expect_faults

    if environment:
        expect_faults()
    run = RankRun(*arguments)
    while True:
        try:
            name, given = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = "", getattr(run, name)(*given)
        except BaseException as error:  # the matrix prints the first line
            answer = f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None
        connection.send(answer)
