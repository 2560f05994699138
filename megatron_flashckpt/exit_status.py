"""Exit status of a training process whose last checkpoint is not durable.

Saves end in the background, so Megatron's training would exit with 0. An own status or exception of
the script stays as it is. Without the launcher `raise SystemExit(3)` cannot be seen, because Python
passes no status to exit handlers; a failed last save then changes the status to 1.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

#: Exit status of stock Megatron after a failed save.
FAILED = 1

_exit: Callable[[Any], NoReturn] | None = None
_chosen: Any = None


def watch() -> None:
    """Record the status of each later `sys.exit` call, which exit handlers cannot see."""
    global _exit
    if _exit is None:
        _exit, sys.exit = sys.exit, _note_and_exit


def _note_and_exit(status: Any = None, /) -> NoReturn:
    # `sys.exit` in another thread ends only that thread.
    if threading.current_thread() is threading.main_thread():
        choose(status)
    assert _exit is not None
    _exit(status)


def choose(status: Any) -> None:
    """Record the status that the process exits with, unless it catches the `SystemExit`."""
    global _chosen
    _chosen = status


def is_success() -> bool:
    """Return whether the process exits with status 0, as far as is known."""
    crashed = getattr(sys, "last_value", None) is not None
    return not crashed and _chosen in (None, 0)


def fail() -> NoReturn:
    """End this process with status 1; for use in an `atexit` handler.

    Python has fixed the status by then, so only `os._exit` changes it. That skips the handlers
    registered before ours; this function does the work of Python's own ones.
    """
    # Children are, for example, workers of data loaders. A process without children may not have
    # imported the module.
    processes = sys.modules.get("multiprocessing")
    for child in processes.active_children() if processes is not None else ():
        if child.daemon:
            child.terminate()
        child.join()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(FAILED)
