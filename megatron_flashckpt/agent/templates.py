"""Templates of layouts, shared by the ranks of a node and kept for restarted ones."""

from __future__ import annotations

import threading
import time

#: Seconds for which ranks wait for the one that computes a template they all need.
_COMPUTING_S = 1.0


class TemplateStore:
    """Encoded templates by fingerprint. Every call is made with `changed` held."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._encoded: dict[str, bytes] = {}
        self._deadlines: dict[str, float] = {}

    def get(self, fingerprint: str) -> bytes | None:
        """Return a template; None tells the asker to compute it, and others to wait for that.

        The ranks of a node make their first save at the same moment: without the wait all of them
        would find nothing and compute the same template.
        """
        if fingerprint not in self._encoded:
            if fingerprint not in self._deadlines:
                self._deadlines[fingerprint] = time.monotonic() + _COMPUTING_S
                return None
            while fingerprint not in self._encoded:
                left = self._deadlines[fingerprint] - time.monotonic()
                if not self._changed.wait(max(left, 0.0)):
                    break
        return self._encoded.get(fingerprint)

    def put(self, fingerprint: str, encoded: bytes) -> None:
        """Keep a template that a rank computed, and wake those that wait for it."""
        self._encoded[fingerprint] = encoded
        self._changed.notify_all()
