"""Work for which a rank waits a bounded time only."""

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
