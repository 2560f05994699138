"""Progress of a study: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import rich.progress
from rich.console import Console


class Progress:
    """Progress bar over all runs on a terminal, else a line per run; both go to stderr."""

    def __init__(self, total: int) -> None:
        self._out = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=20),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("left:"),
            rich.progress.TimeRemainingColumn(),
            console=self._out,
            # Drawing must not take the cores that train.
            refresh_per_second=1,
            transient=True,
            disable=not self._out.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=total)
        self._run = ""

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, run: str) -> None:
        """Show that a run begins."""
        self._run = run
        if not self._out.is_terminal:
            self._out.print(run)
        self.detail("")

    def detail(self, what: str) -> None:
        """Show what the run is doing."""
        self._bar.update(self._task, description=f"{self._run}: {what}" if what else self._run)

    def advance(self) -> None:
        """Show that the run has ended."""
        self._bar.advance(self._task)
