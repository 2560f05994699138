"""Time that a study may take in all: a run begins only if it is expected to end in time."""

from __future__ import annotations

import time
from collections.abc import Hashable


class Budget:
    """Seconds for a study from now on.

    Args:
        run_s: expected seconds of a run of which none has been measured.
    """

    def __init__(self, seconds: float, run_s: float) -> None:
        self.ends_at = time.monotonic() + seconds
        self._run_s = run_s
        self._took: dict[Hashable, float] = {}

    def has_time(self, run: Hashable) -> bool:
        """Return whether a run is expected to end in time: as long as the last of its kind took."""
        expected = self._took.get(run, self._run_s)
        return time.monotonic() + expected <= self.ends_at

    def took(self, run: Hashable, seconds: float) -> None:
        """Note the duration of a run."""
        self._took[run] = seconds
