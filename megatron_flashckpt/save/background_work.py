"""Work of a rank that training does not wait for, or waits for a bounded time only."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def answer_within(
    seconds: float, name: str, work: Callable[[], _T]
) -> concurrent.futures.Future[_T]:
    """Run `work` in a thread called `name`; return when it has ended, or after `seconds`.

    Then the result is not `done`, and the thread keeps waiting for it.
    """
    answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    concurrent.futures.wait([answer], seconds)
    return answer


class BackgroundWork:
    """Runs each piece of work in a thread of its own, after the one before it has ended.

    Used by one thread, which may wait for the last piece.
    """

    def __init__(self) -> None:
        self._last: threading.Thread | None = None

    def begin(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` in a thread called `name`, when earlier work has ended."""
        earlier = self._last

        def run() -> None:
            if earlier is not None:
                earlier.join()
            work()

        self._last = threading.Thread(target=run, name=name, daemon=True)
        self._last.start()

    @property
    def is_running(self) -> bool:
        """True while work runs, or waits for earlier work."""
        return self._last is not None and self._last.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for all work; return False if `timeout_s` passed first."""
        if self._last is not None:
            self._last.join(timeout_s)
        return not self.is_running
