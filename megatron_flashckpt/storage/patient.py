"""Storage that retries reads after transient errors: used by startup, loads and commands.

A server that is unreachable for a moment must not make a job load an older checkpoint. Each attempt
opens the file by its name again, because a stale handle (ESTALE) stays stale. The other ranks wait
in a collective meanwhile, so all retries of one load together take a bounded time. Failed attempts
count in addition to pauses, because a soft NFS mount may take minutes to report an error.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.storage.base import Durable, Kind, Stamp, Storage, Writer
from megatron_flashckpt.storage.scatter_read import KeptFiles, Seen, cut

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds before each further attempt.
RETRIES_S = (2.0, 8.0, 20.0)
#: Random share by which each pause is longer or shorter, so that ranks do not retry in step.
_JITTER = 0.1
#: Upper bound of the seconds that failed attempts and pauses of one load take together. Megatron's
#: collectives time out after 600 s by default.
PATIENCE_S = 120.0
#: Share of the collectives' time-out that a load may wait, if that is less than `PATIENCE_S`.
_SHARE = 0.2
#: The generators of Python and torch belong to a checkpoint and must not be advanced here.
_random = random.SystemRandom()


class RetryingStorage:
    """See `storage.base.Storage`. One instance per load; among the writes only `put` is retried.

    Args:
        collectives_s: time-out of the collectives in which other ranks wait; None: the default.
    """

    def __init__(self, storage: Storage, collectives_s: float | None = None) -> None:
        self._storage = storage
        self._patience_s = PATIENCE_S
        if collectives_s is not None:
            self._patience_s = min(PATIENCE_S, _SHARE * collectives_s)
        self._lock = threading.Lock()
        self._waited_s = 0.0
        #: End of the latest pause of any thread, in `time.monotonic`; the time before it is
        #: counted.
        self._pauses_end = 0.0

    @property
    def place(self) -> str:
        return self._storage.place

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return self.with_retries(lambda: self._storage.read(name, offset, nbytes))

    def read_into(
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
            return before + self._storage.read_into(name, offset + before, rest, note, kept)

        return self.with_retries(read, lambda: kept.drop(name) if kept is not None else None)

    def size(self, name: str) -> int:
        return self.with_retries(lambda: self._storage.size(name))

    def stamp(self, name: str) -> Stamp:
        return self.with_retries(lambda: self._storage.stamp(name))

    def list(self, directory: str) -> list[str]:
        return self.with_retries(lambda: self._storage.list(directory))

    def present(self, directory: str, names: Iterable[str]) -> set[str]:
        wanted = tuple(names)
        return self.with_retries(lambda: self._storage.present(directory, wanted))

    def kind(self, name: str) -> Kind | None:
        return self.with_retries(lambda: self._storage.kind(name))

    def put(
        self,
        name: str,
        data: bytes,
        durable: Durable = "name",
        guard: Callable[[], None] | None = None,
    ) -> None:
        # A `put` that failed may have happened; to repeat it does no harm.
        self.with_retries(lambda: self._storage.put(name, data, durable, guard))

    def with_retries(
        self, attempt: Callable[[], _T], before: Callable[[], object] | None = None
    ) -> _T:
        """Return `attempt()`, repeated after errors that may pass.

        Args:
            before: called before every repeated attempt.
        """
        for number, pause_s in enumerate(RETRIES_S, 1):
            started = time.monotonic()
            try:
                return attempt()
            except OSError as error:
                if not may_pass(error) or not self._may_wait(started, pause_s):
                    raise
                logger.warning(
                    "%s; retry %d of %d in %.1f s",
                    error.strerror if isinstance(error, StorageError) else error,
                    number,
                    len(RETRIES_S),
                    pause_s,
                )
            time.sleep(pause_s * _random.uniform(1 - _JITTER, 1 + _JITTER))
            if before is not None:
                before()
        return attempt()

    def _may_wait(self, started: float, pause_s: float) -> bool:
        """Return whether a failed attempt and the pause after it fit into the bound.

        Time that several threads spend at once counts once.

        Args:
            started: when the attempt began.
        """
        end = time.monotonic() + pause_s
        with self._lock:
            longer_s = max(0.0, end - max(started, self._pauses_end))
            if self._waited_s + longer_s > self._patience_s:
                return False
            self._waited_s += longer_s
            self._pauses_end = max(self._pauses_end, end)
            return True

    # ------------------------------------------------------------------ writes that are not retried

    def rewrite(self, name: str, expected: bytes, data: bytes) -> bool:
        return self._storage.rewrite(name, expected, data)

    def create(self, name: str, nbytes: int) -> Writer:
        return self._storage.create(name, nbytes)

    def delete(self, name: str) -> None:
        self._storage.delete(name)

    def move(self, name: str, to: str) -> None:
        self._storage.move(name, to)

    def delete_directory(self, name: str) -> None:
        self._storage.delete_directory(name)
