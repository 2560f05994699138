"""A thread that does queued work, for callers that must not wait for storage."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Worker:
    """Does work in order, in a thread that begins with the first work. Any thread may add work.

    `add` does no work, because its caller may hold a lock. If no thread can be started, because
    none is left or the process ends (Python 3.12), `wait` and `close` do the work.
    """

    def __init__(self, name: str, failure: str) -> None:
        """Start nothing.

        Args:
            failure: what is logged if work raises an error; the work behind it is done all the
                same.
        """
        self._name = name
        self._failure = failure
        self._work: queue.SimpleQueue[tuple[Callable[[], object], threading.Event] | None]
        self._work = queue.SimpleQueue()
        #: Set when the last work has ended; None before the first.
        self._last: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def add(self, work: Callable[[], object]) -> None:
        """Have the thread call `work`."""
        with self._starting:
            self._last = threading.Event()
            self._work.put((work, self._last))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    @property
    def is_busy(self) -> bool:
        """True while work runs or waits for earlier work."""
        return not self.wait(0.0)

    def wait(self, within_s: float | None = None) -> bool:
        """Wait until all work so far is done; False after `within_s`: the work still goes on."""
        if self._last is None or self._last.is_set():  # without a lock, in each iteration
            return True
        if within_s != 0.0:
            self._do_what_no_thread_does()
        return self._last.wait(within_s)

    def close(self, within_s: float | None = None) -> None:
        """Return when all work is done, or after `within_s`; then the work still goes on."""
        if within_s != 0.0:
            self._do_what_no_thread_does()
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join(within_s)

    def _do_what_no_thread_does(self) -> None:
        """Do the work here if no thread could be started for it."""
        entries = []
        with self._starting, contextlib.suppress(queue.Empty):
            while self._thread is None and (entry := self._work.get_nowait()) is not None:
                entries.append(entry)
        for entry in entries:
            self._do(*entry)

    def _run(self) -> None:
        while (entry := self._work.get()) is not None:
            self._do(*entry)
            del entry  # an idle thread keeps nothing alive

    def _do(self, work: Callable[[], object], ended: threading.Event) -> None:
        try:
            work()
        except Exception:  # otherwise all later work would be lost
            logger.exception("%s", self._failure)
        finally:
            ended.set()
