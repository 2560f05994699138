"""Processes that a job has started, directly or not, whatever session or environment they took.

While `orphans_come_here` lasts, an orphan's new parent is this process, not init. So every process
of a job stays a descendant of this process, and is found without its help.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Collection, Iterator

import psutil

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def orphans_come_here() -> Iterator[None]:
    """Make this process the new parent of orphaned descendants inside the context.

    Raises:
        OSError: the kernel refused.
    """
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(before.value))


def _prctl(option: int, argument: object) -> None:
    if _LIBC.prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def descendants() -> set[psutil.Process]:
    """Return all living and ended-but-unread descendants of this process."""
    return set(psutil.Process().children(recursive=True))


def living(known: Collection[psutil.Process], awaited: Collection[int]) -> list[psutil.Process]:
    """Return the living descendants that are not in `known`; reap adopted ones that have ended.

    Args:
        awaited: ids of children whose exit status somebody else reads.
    """
    result = []
    for process in descendants().difference(known):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                result.append(process)
            elif process.pid not in awaited:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
    return result


def end(
    known: Collection[psutil.Process], awaited: Collection[int], within_s: float
) -> list[psutil.Process]:
    """Send SIGKILL to all descendants that are not in `known`, until there are none.

    A process that the kernel cannot end, as in a GPU's driver, is waited for.

    Returns:
        Processes that were still there after `within_s`.
    """
    deadline = time.monotonic() + within_s
    while (rest := living(known, awaited)) and time.monotonic() < deadline:
        for process in rest:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)
    return rest
