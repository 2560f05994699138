"""Processes of programs in `tools.gpu_check.children`, and their reports."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tools.gpu_check.forkserver import Process
from tools.gpu_check.report import FIGURE, Report


class Child:
    """Process of a program, and its report."""

    def __init__(self, name: str, where: Path, **environment: str) -> None:
        """Start the process.

        Args:
            name: module of `tools.gpu_check.children`.
            where: directory for the files of the process; becomes the variable WHERE.
            environment: additional environment variables.
        """
        where.mkdir(exist_ok=True)
        self._report = where / f"{name}-{time.monotonic_ns()}"
        self._report.touch()
        self._output = self._report.with_suffix(".out")
        self._output.touch()
        self._process = Process(
            "tools.gpu_check.section",
            [f"tools.gpu_check.children.{name}", "-", str(self._report), "inf", "1"],
            {**os.environ, "WHERE": str(where), **environment},
            self._output,
        )
        self.ended_at: float | None = None
        """Time at which the end was noticed, on the monotonic clock."""

    @property
    def status(self) -> int | None:
        """Exit status as of `subprocess`; None while the process runs."""
        return self._process.returncode

    def look(self, within_s: float = 0.0) -> bool:
        """Return whether the process ends within some seconds; record the time of the end."""
        if self.ended_at is None and self._process.wait(within_s) is not None:
            self.ended_at = time.monotonic()
        return self.ended_at is not None

    def kill(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self.look()

    @property
    def output(self) -> str:
        """Last lines of the process's output."""
        return self._output.read_text(errors="replace")[-1200:]

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines of the report so far."""
        return [json.loads(line) for line in self._report.read_text().splitlines()]

    def value(self, what: str) -> float | None:
        """Return the figure with the name `what`; None if it was not reported."""
        for line in self.lines():
            if line["what"] == what and line["value"] is not None:
                return float(line["value"])
        return None

    def seconds_since(self, what: str) -> float | None:
        """Return the time from the moment in the figure `what` to the end; None if unknown."""
        moment = self.value(what)
        return None if moment is None or self.ended_at is None else self.ended_at - moment

    def pass_on(self, report: Report, *, figures: bool = False) -> None:
        """Report the rules, notes and skips of the process, and with `figures` its figures."""
        for line in self.lines():
            if figures or line["kind"] != FIGURE:
                report.add(line)


def wait(children: list[Child], within_s: float) -> None:
    """Wait until all processes have ended; kill those that still run after `within_s`."""
    deadline = time.monotonic() + within_s
    while not all(child.look() for child in children) and time.monotonic() < deadline:
        for child in children:
            child.look(0.005)
    for child in children:
        child.kill()
