"""A trainer in a process of its own, which starts later than others and does what it is asked.

Imports nothing of megatron_flashckpt, which a forked process imports when it has its environment.
"""

from __future__ import annotations

import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.forked.nursery import nursery, settle_in

#: Longest wait for an answer; a cell that needs it has failed.
_PATIENCE_S = 60.0


class Later:
    """The process, seen from the test's."""

    def __init__(self, home: Path, *arguments: Any) -> None:
        """Start a process that makes `second_starts.Life(*arguments)` when it is asked."""
        made = nursery()
        self._connection, other = made.Pipe()
        # Not at the top: the forked process imports this module before it has its environment.
        from tests.crash import trouble

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
        """Have it call a method; `answer` returns what came of it."""
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
    from tests.crash.second_starts import Life
    from tests.crash.trouble import retry_at_once

    if environment:
        retry_at_once()
    life = Life(*arguments)
    while True:
        try:
            name, given = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = "", getattr(life, name)(*given)
        except BaseException as error:  # the first line is what the matrix prints
            answer = f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None
        connection.send(answer)
