"""Templates of layouts, shared by the ranks of a node and kept for restarted ones."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

#: Seconds that ranks wait for the rank that computes their template. If that rank dies, the wait
#: ends earlier; if it is slow, it delays the others' training step anyway.
_COMPUTING_S = 30.0


class _Computing(NamedTuple):
    rank: int
    until: float
    """Time, by the monotonic clock, after which another rank may compute the template."""


class TemplateStore:
    """Encoded templates by fingerprint. Callers hold `changed`."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._encoded: dict[str, bytes] = {}
        self._computing: dict[str, _Computing] = {}

    def get(self, rank: int, fingerprint: str, wait_s: float) -> tuple[bytes | None, bool]:
        """Return a template, or None and whether another rank is still computing it.

        After None and False, `rank` must compute the template. The ranks of a node plan at the same
        moment: without the wait, all of them would compute the same template.
        """
        deadline = time.monotonic() + wait_s
        while fingerprint not in self._encoded:
            now = time.monotonic()
            computing = self._computing.get(fingerprint)
            if computing is None or computing.rank == rank or computing.until <= now:
                self._computing[fingerprint] = _Computing(rank, now + _COMPUTING_S)
                return None, False
            if deadline <= now:
                return None, True
            self._changed.wait(min(computing.until, deadline) - now)
        return self._encoded[fingerprint], False

    def put(self, fingerprint: str, encoded: bytes) -> None:
        """Store a computed template, and wake the ranks that wait for it."""
        self._encoded[fingerprint] = encoded
        self._computing.pop(fingerprint, None)
        self._changed.notify_all()

    def release(self, rank: int) -> None:
        """Let another rank compute the templates that `rank`, which has disconnected, began."""
        for fingerprint in [key for key, state in self._computing.items() if state.rank == rank]:
            del self._computing[fingerprint]
        self._changed.notify_all()
