"""Keeps a process's descriptors out of the children that it forks.

A trainer forks workers for its data loaders, which live as long as the trainer. `CLOEXEC` does not
help, because they never exec. Memory that such a child keeps cannot be freed, and a socket that it
keeps hides the trainer's end from the agent.

Code that makes such a descriptor does so under `held_off`, and registers the descriptor's owner
with `close_in_children` before it leaves that context.
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


def held_off() -> contextlib.AbstractContextManager[object]:
    """Return a context in which no other thread forks. Keep it short: forks wait for its end."""
    return _lock


def close_in_children(owner: Owner) -> None:
    """Have `owner.close()` called in each forked child, before anything else runs there."""
    _owners.add(owner)


def depth() -> int:
    """Return the number of forks between the process that imported this module and this one.

    A process id would not do: a child in another PID namespace may have its parent's.
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
