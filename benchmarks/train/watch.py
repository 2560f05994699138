"""Thread that observes a job from outside: its output, its tracker file, and the host's memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

#: Times are exact to this many seconds.
_POLL_S = 0.005
#: Polls between two readings of the host's memory.
_POLLS_PER_MEMORY = 10


class Watch:
    """Observations of one job. The ranks write files, never pipes, which a child could keep open.

    Args:
        outputs: the output file of each rank; they exist.
        tracker: Megatron's tracker file, or None for a job without saves.
        on_line: receives each line and the time at which it appeared, in the watching thread.
    """

    def __init__(
        self,
        outputs: list[Path],
        tracker: Path | None,
        on_line: Callable[[str, float], None],
    ) -> None:
        self.tracked_at: dict[int, float] = {}
        """Time at which the tracker first named an iteration."""
        self.line_at = time.perf_counter()
        """Time of the last line, or of the start."""
        self._outputs, self._tracker, self._on_line = outputs, tracker, on_line
        self._available = self._least_available = available_nbytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def peak_nbytes(self) -> int:
        """Largest fall of the host's available memory so far, page cache left out."""
        return max(0, self._available - self._least_available)

    def finish(self) -> None:
        """Read what the ranks have written so far, and end; a second call does nothing."""
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        with contextlib.ExitStack() as opened:
            files = [
                opened.enter_context(path.open(encoding="utf-8", errors="replace"))
                for path in self._outputs
            ]
            partial = [""] * len(files)
            polls, is_last = 0, False
            while not is_last:
                is_last = self._end.wait(_POLL_S)
                self._read_tracker()
                for number, file in enumerate(files):
                    *lines, partial[number] = (partial[number] + file.read()).split("\n")
                    for line in lines:
                        self._pass_on(f"{line}\n")
                if polls % _POLLS_PER_MEMORY == 0:
                    self._least_available = min(self._least_available, available_nbytes())
                polls += 1
            for rest in filter(None, partial):
                self._pass_on(rest)

    def _pass_on(self, line: str) -> None:
        self.line_at = time.perf_counter()
        self._on_line(line, self.line_at)

    def _read_tracker(self) -> None:
        if (iteration := tracked(self._tracker)) is not None:
            self.tracked_at.setdefault(iteration, time.perf_counter())


def tracked(tracker: Path | None) -> int | None:
    """Return the iteration that a tracker file names, or None."""
    try:
        return int(tracker.read_text()) if tracker else None
    except (OSError, ValueError):
        return None


def available_nbytes() -> int:
    """Return the kernel's estimate of the memory that new work could have.

    Unlike the sum of the processes, it counts memory that a GPU's driver has page-locked.
    """
    return int(psutil.virtual_memory().available)
