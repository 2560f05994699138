"""Processes of programs in `tools.gpu_check.children`, and their reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.gpu_check.report import FIGURE, MUST, NOTE, SKIP, Report

_ROOT = Path(__file__).parents[2]
_LOOK_S = 0.01


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
        self.name = name
        self._report = where / f"{name}-{time.monotonic_ns()}"
        self._report.touch()
        self._output = self._report.with_suffix(".out")
        command = [sys.executable, "-m", "tools.gpu_check.section", name]
        command += ["--package", "tools.gpu_check.children", "--to", str(self._report)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env={**os.environ, "WHERE": str(where), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.status: int | None = None
        """Exit status as of `subprocess`; None while the process runs."""
        self.ended_at: float | None = None
        """Time at which the end was noticed, on the monotonic clock."""

    def look(self) -> bool:
        """Return whether the process has ended; record the time of the end."""
        if self.status is None and (status := self._process.poll()) is not None:
            self.status, self.ended_at = status, time.monotonic()
        return self.status is not None

    def kill(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self._process.wait()
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
            what, detail = line["what"], line["detail"]
            if line["kind"] == MUST:
                report.must(what, line["ok"], detail)
            elif line["kind"] == NOTE:
                report.note(what, detail)
            elif line["kind"] == SKIP:
                report.skip(what, detail)
            elif line["kind"] == FIGURE and figures:
                report.figure(what, line["value"], line["unit"], detail)


def wait(children: list[Child], within_s: float) -> None:
    """Wait until all processes have ended; kill those that still run after `within_s`."""
    deadline = time.monotonic() + within_s
    while any(child.status is None for child in children) and time.monotonic() < deadline:
        for child in children:
            child.look()
        time.sleep(_LOOK_S)
    for child in children:
        if child.status is None:
            child.kill()
