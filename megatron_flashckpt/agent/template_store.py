"""Templates of layouts, shared by the ranks of a node and kept for restarted ones."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

#: Seconds for which ranks wait for the one that computes a template they all need. A rank that dies
#: ends the wait earlier; one that is merely slow holds up the others' training step anyway.
_COMPUTING_S = 30.0


class _Computing(NamedTuple):
    rank: int
    until: float
    """When another rank may compute the template instead, by the monotonic clock."""


class TemplateStore:
    """Encoded templates by fingerprint. Every call is made with `changed` held."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._encoded: dict[str, bytes] = {}
        self._computing: dict[str, _Computing] = {}

    def get(self, rank: int, fingerprint: str, wait_s: float) -> tuple[bytes | None, bool]:
        """Return a template, or None; and then True if another rank is still computing it.

        None and False tell `rank` to compute the template. The ranks of a node plan at the same
        moment: without the wait all of them would find nothing and compute the same template.
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
        """Keep a template that a rank computed, and wake those that wait for it."""
        self._encoded[fingerprint] = encoded
        self._computing.pop(fingerprint, None)
        self._changed.notify_all()

    def release(self, rank: int) -> None:
        """Let another rank compute what `rank`, which has hung up, did not finish."""
        for fingerprint in [key for key, it in self._computing.items() if it.rank == rank]:
            del self._computing[fingerprint]
        self._changed.notify_all()
