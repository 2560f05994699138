"""A store that repeats calls after errors that may pass: the only place that knows for how long.

A server that is unreachable for a moment must not make a job load an older checkpoint, or lose a
save. Each attempt opens the object by its name again, because a stale handle (ESTALE) stays stale.
"""

from __future__ import annotations

import builtins
import itertools
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from megatron_flashckpt import error_classes
from megatron_flashckpt.errors import AlreadyExistsError, StorageError
from megatron_flashckpt.storage.scatter_read import KeptFiles, Seen, cut
from megatron_flashckpt.storage.store import Entry, Store, Writer

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


#: Seconds before each further attempt after an error that may pass.
PAUSES_S: tuple[float, ...] = (0.5, 2.0, 8.0, 20.0)
#: Classes of errors after which the last pause is repeated until the deadline of the call. EIO and
#: ESTALE are of other classes: if they persist, they mean damage, and then an older checkpoint is
#: loaded soon.
UNTIL_DEADLINE: tuple[error_classes.Kind, ...] = ("transient",)
#: Random share by which each pause is longer or shorter, so that nodes do not retry in step.
_JITTER = 0.1
#: Default of the seconds from the start of a call to its last attempt.
CALL_S = 60.0
#: Upper bound of the seconds that failed attempts and pauses of one load take together. Megatron's
#: collectives time out after 600 s by default.
_LOAD_S = 120.0
#: Share of the collectives' time-out that a load may wait, if that is less than `_LOAD_S`.
_SHARE = 0.2
#: The generators of Python and torch belong to a checkpoint and must not be advanced here.
_random = random.SystemRandom()


def load_patience_s(collectives_s: float | None = None) -> float:
    """Return `total_s` for the store of one load, during which other ranks wait in a collective.

    Args:
        collectives_s: time-out of the collectives; None: Megatron's default.
    """
    return _LOAD_S if collectives_s is None else min(_LOAD_S, _SHARE * collectives_s)


class RetryingStore:
    """See `storage.store.Store`. A writer's methods are not retried: the whole object has to be."""

    def __init__(self, store: Store, *, call_s: float = CALL_S, total_s: float = math.inf) -> None:
        """Wrap `store`.

        Args:
            call_s: seconds from the start of a call after which no attempt begins.
            total_s: bound of the seconds that failed attempts and pauses of all calls take
                together. Attempts count, because a soft NFS mount may take minutes to fail.
        """
        self._store = store
        self.place, self.advice = store.place, store.advice
        self.pace, self.in_order = store.pace, store.in_order
        self._call_s = min(call_s, total_s)
        self._total_s = total_s
        self._lock = threading.Lock()
        self._waited_s = 0.0
        #: End of the latest pause of any thread; the time before it is in `_waited_s`.
        self._pauses_end = -math.inf

    def get(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return self.with_retries(lambda: self._store.get(name, offset, nbytes))

    def get_into(
        self,
        name: str,
        offset: int,
        parts: Sequence[memoryview],
        seen: Seen | None = None,
        kept: KeptFiles | None = None,
    ) -> int:
        done = 0

        def note(block: memoryview) -> None:
            nonlocal done
            done += block.nbytes
            if seen is not None:
                seen(block)

        def read() -> int:
            # Continue behind the bytes that were read, because `seen` has digested them already.
            before = done
            rest = cut(parts, before) if before else parts
            return before + self._store.get_into(name, offset + before, rest, note, kept)

        return self.with_retries(read)

    def put(self, name: str, data: bytes) -> None:
        self.with_retries(lambda: self._store.put(name, data))

    def create(self, name: str, data: bytes) -> None:
        """See `Store.create`. An attempt that failed may have made the object: equal bytes count.

        If the last attempt fails, the caller reads the name back.
        """
        has_failed = False

        def attempt() -> None:
            nonlocal has_failed
            try:
                self._store.create(name, data)
            except OSError as error:
                has_failed |= not isinstance(error, AlreadyExistsError)
                raise

        try:
            self.with_retries(attempt)
        except AlreadyExistsError:
            if not (has_failed and self._holds(name, data)):
                raise
            self.make_durable(name)

    def writer(self, name: str, nbytes: int) -> Writer:
        return self.with_retries(lambda: self._store.writer(name, nbytes))

    def stat(self, name: str) -> Entry | None:
        return self.with_retries(lambda: self._store.stat(name))

    def list(self, directory: str, *, sizes: bool = True) -> builtins.list[Entry]:
        return self.with_retries(lambda: self._store.list(directory, sizes=sizes))

    def delete(self, names: Iterable[str]) -> None:
        wanted = tuple(names)
        self.with_retries(lambda: self._store.delete(wanted))

    def discard_unfinished(self, directory: str, is_dead: Callable[[str], bool]) -> None:
        self.with_retries(lambda: self._store.discard_unfinished(directory, is_dead))

    def make_durable(self, name: str) -> None:
        self.with_retries(lambda: self._store.make_durable(name))

    def with_retries(self, attempt: Callable[[], _T]) -> _T:
        """Return `attempt()`, repeated after errors that may pass.

        Args:
            attempt: may be repeated without harm after it has failed.
        """
        deadline = time.monotonic() + self._call_s
        for number in itertools.count():
            started = time.monotonic()
            try:
                return attempt()
            except OSError as error:
                pause_s = _pause_s(error, number)
                if (
                    pause_s is None
                    or time.monotonic() + pause_s > deadline
                    or not self._may_wait(started, pause_s)
                ):
                    raise
                logger.warning(
                    "%s; retry %d in %.1f s",
                    error.strerror if isinstance(error, StorageError) else error,
                    number + 1,
                    pause_s,
                )
            time.sleep(pause_s * _random.uniform(1 - _JITTER, 1 + _JITTER))
        raise AssertionError("unreachable")

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return self.get(name) == data
        except FileNotFoundError:  # visible late: the caller of `create` reads it back
            return False

    def _may_wait(self, started: float, pause_s: float) -> bool:
        """Return whether a failed attempt and the pause after it fit into `total_s`.

        Time that several threads spend at once counts once.

        Args:
            started: when the attempt began.
        """
        end = time.monotonic() + pause_s
        with self._lock:
            longer_s = max(0.0, end - max(started, self._pauses_end))
            if self._waited_s + longer_s > self._total_s:
                return False
            self._waited_s += longer_s
            self._pauses_end = max(self._pauses_end, end)
            return True


def _pause_s(error: OSError, failed: int) -> float | None:
    """Return the pause before the next attempt; None: there is none.

    Args:
        failed: attempts that failed before the one with `error`.
    """
    error_class = error_classes.class_of(error)
    if not error_class.may_pass:
        return None
    if failed < len(PAUSES_S):
        return PAUSES_S[failed]
    return PAUSES_S[-1] if error_class.kind in UNTIL_DEADLINE else None
