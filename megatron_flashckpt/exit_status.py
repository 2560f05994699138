"""The exit status of a training process whose last checkpoint is not durable.

Megatron's training ends as if all were well, because saves end in the background. A status or an
exception that the script itself ends with stays as it is. Of `raise SystemExit(3)` nothing is seen
without the launcher: Python tells no handler at exit, so a last save that has failed makes it 1.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

#: What stock Megatron exits with when a save fails.
FAILED = 1

_exit: Callable[[Any], NoReturn] | None = None
_chosen: Any = None


def watch() -> None:
    """Note from now on what the script calls `sys.exit` with: handlers at exit cannot see it."""
    global _exit
    if _exit is None:
        _exit, sys.exit = sys.exit, _note_and_exit


def _note_and_exit(status: Any = None, /) -> NoReturn:
    # In another thread `sys.exit` ends that thread, not the process.
    if threading.current_thread() is threading.main_thread():
        choose(status)
    assert _exit is not None
    _exit(status)


def choose(status: Any) -> None:
    """Note what the process is about to exit with, unless it catches the `SystemExit`."""
    global _chosen
    _chosen = status


def is_success() -> bool:
    """Return whether the process is about to exit with status 0, as far as is known."""
    crashed = getattr(sys, "last_value", None) is not None
    return not crashed and _chosen in (None, 0)


def fail() -> NoReturn:
    """End this process with status 1. Called by a handler of `atexit` only.

    Python has fixed the status by then, so only `os._exit` changes it. The handlers that were
    registered before ours are left out; what they do for everybody is done here.
    """
    # Data loaders' workers are such children. Without this module there are none.
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
