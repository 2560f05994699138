"""Keeps an agent whose run was overtaken from changing files that others see.

`Fence.check` runs right before each such change: a file that is put, moved, created or deleted in a
save directory. So an agent that hung, and wakes after a later run has claimed the directory, stops
at its next change.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from megatron_flashckpt.agent import claim as claims
from megatron_flashckpt.agent.claim import Claim, RunKey
from megatron_flashckpt.errors import OvertakenError, StorageError
from megatron_flashckpt.storage.base import Durable, Kind, Stamp, Storage, Writer
from megatron_flashckpt.storage.scatter_read import KeptFiles, Seen

logger = logging.getLogger(__name__)

#: Seconds for which one check is valid, because files are deleted by the thousand.
_RECENT_S = 0.1
#: Seconds that an agent without rank 0 waits for its trainers to report a later run. The run may be
#: their own: they report it a moment after its claim is written.
_REPORT_S = 10.0


class Fence:
    """The runs that an agent works for. Safe to use from several threads.

    Trainers report their run to the agent; the claim in storage decides which run may write. An
    agent without a reported run accepts the first claim that it finds, and no later one.
    """

    def __init__(self, report_s: float = _REPORT_S) -> None:
        self._report_s = report_s
        self._changed = threading.Condition()
        #: Runs that trainers have reported, and whether the run's rank 0 is on this node.
        self._reported: dict[RunKey, bool] = {}
        self._newest: RunKey | None = None
        #: True once the claim of the newest run was seen: rank 0 reports the run before it writes
        #: the claim.
        self._is_put = False
        #: The first claim that was found while no trainer had reported a run.
        self._first: RunKey | None = None
        self._has_looked = False
        self._directory: tuple[int, int] | None = None
        self._checked_at = -math.inf
        #: The unknown run for which `_await_report` has already waited.
        self._unknown_run: RunKey | None = None
        #: True if the log says that the run was overtaken.
        self._has_logged = False

    @property
    def newest(self) -> RunKey | None:
        """The run that trainers have reported last; None if they have reported none."""
        return self._newest

    def hold(self, key: RunKey, *, has_rank_0: bool) -> None:
        """Work for run `key` in addition to earlier ones, once storage has its claim."""
        with self._changed:
            if key not in self._reported:
                self._newest, self._is_put = key, False
            self._reported[key] = has_rank_0 or self._reported.get(key, False)
            self._changed.notify_all()

    def check(self, storage: Storage, within_s: float = 0.0) -> None:
        """Raise unless this agent may write to `storage`.

        Args:
            within_s: a check that passed at most this many seconds ago is sufficient.

        Raises:
            OvertakenError: names the later run.
            StorageError: the directory is away, or another one without a claim is in its place.
        """
        now = time.monotonic()
        with self._changed:
            if now - self._checked_at <= within_s:
                return
        claim, directory = claims.read(storage), _directory_of(storage)
        with self._changed:
            if not self._accepts(claim, directory) and not self._commits(claim):
                self._await_report(claim, directory)
            if self._accepts(claim, directory):
                self._checked_at, self._has_logged = now, False
                return
            had_logged, self._has_logged = self._has_logged, True
            self._checked_at = -math.inf
        message = _why_not(storage, claim)
        if not had_logged:
            logger.error("%s", message)
        if claim is None:  # away, perhaps not for long
            raise StorageError(errno.ENOENT, message)
        raise OvertakenError(message)

    def holds(self, claim: Claim | None) -> bool:
        """Return whether `claim` is of a run that trainers of this agent have reported."""
        with self._changed:
            return claim is not None and claim.key in self._reported

    def _await_report(self, claim: Claim | None, directory: tuple[int, int] | None) -> None:
        """Wait once per unknown run until trainers report that run, or `report_s` is over."""
        key = None if claim is None else claim.key
        if key != self._unknown_run:
            self._changed.wait_for(lambda: self._accepts(claim, directory), self._report_s)
            self._unknown_run = key

    def check_commits(self, storage: Storage) -> None:
        """Raise unless this agent may write, and the rank 0 of its run is on this node.

        Raises:
            OvertakenError: names the later run, or says that another agent commits.
        """
        self.check(storage)
        claim = claims.read(storage)
        with self._changed:
            if self._commits(claim):
                return
        raise OvertakenError(
            f"{storage.place}: rank 0 has moved to another node since this save was staged, and "
            "only the agent of that node commits"
        )

    def may_renew(self, claim: Claim) -> bool:
        """Return whether a claim is of a run whose rank 0 is on this node."""
        with self._changed:
            return self._reported.get(claim.key, False)

    def _commits(self, claim: Claim | None) -> bool:
        """Return whether this agent commits while storage has this claim. The lock is held."""
        if claim is not None and claim.key in self._reported:
            return self._reported[claim.key]
        return self._newest is None or self._reported[self._newest]

    def _accepts(self, claim: Claim | None, directory: tuple[int, int] | None) -> bool:
        """Return whether `claim` allows this agent to write. The caller holds the lock."""
        key = None if claim is None else claim.key
        if self._newest is None and not self._has_looked:
            self._has_looked, self._first = True, key
        if key is None:
            # Without a claim (never made, or removed), no other run writes. But a directory with
            # another identity belongs to another job, or is an empty mount point.
            return self._directory in (None, directory)
        if key in self._reported:
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


def _why_not(storage: Storage, claim: Claim | None) -> str:
    if claim is None:
        return (
            f"{storage.place}: was removed or replaced since this run claimed it, so this run "
            "writes nothing there; put it back (is its file system mounted?), or restart the job"
        )
    if claim.state == claims.ENDED or claim.is_of_dead_process:
        return (
            f"{storage.place}: {claim.writer} has taken over this save directory and has ended; "
            "this run writes nothing there, because that run continued in another way: start this "
            "job again"
        )
    return (
        f"{storage.place}: {claim.writer} has taken over this save directory, so this run no "
        "longer writes there; end one of the two jobs, or save elsewhere"
    )


class FencedStorage:
    """A save directory whose changes are made only if the fence allows them."""

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

        # Check first; otherwise a removed directory would be created again.
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
