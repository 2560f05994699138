"""Descriptors that a process closes in the children that it forks.

A trainer forks workers for its data loaders, which live as long as the trainer. `CLOEXEC` does not
close their descriptors, because the workers never exec. An open descriptor in a worker keeps memory
allocated, and an open socket hides the trainer's end from the agent.

Code opens such a descriptor inside the context `forks_blocked`, and registers its owner with
`close_in_children` before it leaves the context.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Protocol


class Owner(Protocol):
    """Object that owns a descriptor."""

    def close(self) -> None:
        """Close the descriptor; do nothing if it is closed."""


#: Reentrant, because a signal handler may fork.
_lock = threading.RLock()
_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_depth = 0


def forks_blocked() -> contextlib.AbstractContextManager[object]:
    """Return a context in which no other thread forks. Keep it short, because forks wait for it."""
    return _lock


def close_in_children(owner: Owner) -> None:
    """Call `owner.close()` in each forked child, before other code runs there."""
    _owners.add(owner)


def depth() -> int:
    """Return the number of forks from the process that imported this module to this process.

    Process ids cannot tell a child from its parent: a child in another PID namespace may have the
    same one.
    """
    return _depth


def _begin_child() -> None:
    global _depth
    _depth += 1
    for owner in list(_owners):
        with contextlib.suppress(OSError):
            owner.close()
    _lock.release()


os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_child
)
