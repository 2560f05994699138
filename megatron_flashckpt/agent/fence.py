"""Keeps an agent whose run was overtaken from writing anything that others see.

Every step that others see asks `Fence.check` right before: files that are put, moved, created or
deleted in a save directory. So an agent that hung, and wakes after a later run has claimed the
directory, stops at its next step.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from megatron_flashckpt.agent import claim as claims
from megatron_flashckpt.agent.claim import Claim, RunKey
from megatron_flashckpt.errors import OvertakenError
from megatron_flashckpt.storage.base import Durable, Kind, Stamp, Storage, Writer
from megatron_flashckpt.storage.scatter_read import KeptFiles, Seen

logger = logging.getLogger(__name__)

#: Files are deleted by the thousand: a look at the claim counts for so long.
_RECENT_S = 0.1
#: Seconds that an agent without rank 0 waits to be told of a later run, which may be that of its
#: own trainers: they tell it a moment after the claim was put.
_TOLD_S = 10.0


class Fence:
    """The runs that an agent works for. Safe to use from several threads.

    Trainers tell the agent of their run; the claim in storage decides which run it is. An agent
    that was told of no run accepts the claim that it finds first, and none that follows.
    """

    def __init__(self, told_s: float = _TOLD_S) -> None:
        self._told_s = told_s
        self._changed = threading.Condition()
        #: Runs that trainers have told of, and whether the rank 0 of the run is on this node.
        self._told: dict[RunKey, bool] = {}
        self._newest: RunKey | None = None
        #: Whether the claim of the newest run was seen: rank 0 tells its agent before it puts it.
        self._is_put = False
        #: The claim that was found first, if trainers have told of no run.
        self._first: RunKey | None = None
        self._has_looked = False
        self._directory: tuple[int, int] | None = None
        self._checked_at = -math.inf
        #: The run that trainers were given time to tell of.
        self._strange: RunKey | None = None
        #: Whether the log says that the run was overtaken.
        self._has_said = False

    @property
    def newest(self) -> RunKey | None:
        """The run that trainers have told of last; None if they have told of none."""
        return self._newest

    def hold(self, key: RunKey, *, has_rank_0: bool) -> None:
        """Work for run `key`, too, once storage has its claim."""
        with self._changed:
            if key not in self._told:
                self._newest, self._is_put = key, False
            self._told[key] = has_rank_0 or self._told.get(key, False)
            self._changed.notify_all()

    def check(self, storage: Storage, within_s: float = 0.0) -> None:
        """Raise unless this agent may write to `storage`.

        Args:
            within_s: a check that passed so many seconds ago counts.

        Raises:
            OvertakenError: names the later run.
        """
        now = time.monotonic()
        with self._changed:
            if now - self._checked_at <= within_s:
                return
        found, directory = claims.read(storage), _directory_of(storage)
        with self._changed:
            if not self._accepts(found, directory) and not self._commits(found):
                self._await_told(found, directory)
            if self._accepts(found, directory):
                self._checked_at, self._has_said = now, False
                return
            has_said, self._has_said = self._has_said, True
            self._checked_at = -math.inf
        message = _why_not(storage, found)
        if not has_said:
            logger.error("%s", message)
        raise OvertakenError(message)

    def _await_told(self, found: Claim | None, directory: tuple[int, int] | None) -> None:
        """Return when trainers have told of the run that claims, or have had the time to."""
        key = None if found is None else found.key
        if key != self._strange:
            self._changed.wait_for(lambda: self._accepts(found, directory), self._told_s)
            self._strange = key

    def check_commits(self, storage: Storage) -> None:
        """Raise unless this agent may write, and the rank 0 of its run is on this node.

        Raises:
            OvertakenError: names the later run, or says that another agent commits.
        """
        self.check(storage)
        found = claims.read(storage)
        with self._changed:
            if self._commits(found):
                return
        raise OvertakenError(
            f"{storage.place}: rank 0 is on another node since this was staged, and only the agent "
            "of that node commits"
        )

    def may_renew(self, found: Claim) -> bool:
        """Return whether a claim is of a run whose rank 0 is on this node."""
        with self._changed:
            return self._told.get(found.key, False)

    def _commits(self, found: Claim | None) -> bool:
        """Return whether this agent commits while storage has this claim. The lock is held."""
        if found is not None and found.key in self._told:
            return self._told[found.key]
        return self._newest is None or self._told[self._newest]

    def _accepts(self, found: Claim | None, directory: tuple[int, int] | None) -> bool:
        """Return whether `found` is the claim of a run of this agent. The lock is held."""
        key = None if found is None else found.key
        if self._newest is None and not self._has_looked:
            self._has_looked, self._first = True, key
        if key is None:
            # Nobody has claimed the directory, or somebody removed the claim: nobody else writes.
            # But what stands in the place of the directory that we knew is another job's, or an
            # empty mount point.
            return self._directory in (None, directory)
        if key in self._told:
            self._is_put = self._is_put or key == self._newest
        elif self._newest is None:
            return key == self._first
        elif self._is_put or key.epoch >= self._newest.epoch:
            return False
        self._directory = directory
        return True


def _directory_of(storage: Storage) -> tuple[int, int] | None:
    try:
        status = os.stat(storage.place)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _why_not(storage: Storage, found: Claim | None) -> str:
    if found is None:
        return (
            f"{storage.place}: was removed or replaced since this run has claimed it, so nothing "
            "is written there; put it back (is its file system mounted?), or restart the job"
        )
    return (
        f"{storage.place}: {found.writer} has taken over this save directory, so this run writes "
        "nothing there any more; end one of the two jobs, or save elsewhere"
    )


class FencedStorage:
    """A save directory in which each change is made only if the fence allows it."""

    def __init__(self, storage: Storage, fence: Fence) -> None:
        self._storage = storage
        self._fence = fence

    @property
    def place(self) -> str:
        return self._storage.place

    def put(
        self,
        name: str,
        data: bytes,
        durable: Durable = "name",
        guard: Callable[[], None] | None = None,
    ) -> None:
        def check() -> None:
            self._fence.check(self._storage)
            if guard is not None:
                guard()

        # First, or a directory that was removed would be made again.
        self._fence.check(self._storage, _RECENT_S)
        self._storage.put(name, data, durable, check)

    def rewrite(self, name: str, expected: bytes, data: bytes) -> bool:
        self._fence.check(self._storage)
        return self._storage.rewrite(name, expected, data)

    def create(self, name: str, nbytes: int) -> Writer:
        self._fence.check(self._storage)
        return self._storage.create(name, nbytes)

    def delete(self, name: str) -> None:
        self._fence.check(self._storage, _RECENT_S)
        self._storage.delete(name)

    def move(self, name: str, to: str) -> None:
        self._fence.check(self._storage)
        self._storage.move(name, to)

    def delete_directory(self, name: str) -> None:
        self._fence.check(self._storage, _RECENT_S)
        self._storage.delete_directory(name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return self._storage.read(name, offset, nbytes)

    def read_into(
        self,
        name: str,
        offset: int,
        parts: Sequence[memoryview],
        seen: Seen | None = None,
        kept: KeptFiles | None = None,
    ) -> int:
        return self._storage.read_into(name, offset, parts, seen, kept)

    def size(self, name: str) -> int:
        return self._storage.size(name)

    def stamp(self, name: str) -> Stamp:
        return self._storage.stamp(name)

    def list(self, directory: str) -> list[str]:
        return self._storage.list(directory)

    def present(self, directory: str, names: Iterable[str]) -> set[str]:
        return self._storage.present(directory, names)

    def kind(self, name: str) -> Kind | None:
        return self._storage.kind(name)
