"""Keeps a process's descriptors out of the children that it forks.

A trainer forks workers for its data loaders, which live as long as it does. `CLOEXEC` does not
help: they never exec. Memory that such a child keeps cannot be freed, and a socket that it keeps
hides the trainer's end from the agent.

Whoever makes a descriptor does so under `held_off`, and registers its owner before it leaves that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Protocol


class Owner(Protocol):
    """Owns a descriptor."""

    def close(self) -> None:
        """Close the descriptor, once."""


#: Reentrant: a signal handler may fork.
_lock = threading.RLock()
_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_depth = 0


def held_off() -> contextlib.AbstractContextManager[object]:
    """Return a context in which no other thread forks. Forks wait: keep it short."""
    return _lock


def close_in_children(owner: Owner) -> None:
    """Have `owner.close()` called in each forked child, before anything else runs there."""
    _owners.add(owner)


def depth() -> int:
    """Return how many forks this process is away from the one that loaded this module.

    Process ids do not tell a child from its parent: namespaces repeat them.
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
