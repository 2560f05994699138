"""Processes of sections and of the programs that they start, and their reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.gpu_check.forkserver import Process
from tools.gpu_check.report import FIGURE, MUST, SKIP, Report
from tools.gpu_check.sections import Section

#: Seconds that a killed process may take to end; inside the GPU's driver it takes seconds.
_GONE_S = 10.0
#: Number of last lines of a crashed section's output that are kept.
_TAIL = 30

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    lines: list[Line]
    """Lines that the section reported and the driver added."""
    seconds: float
    output: str = ""
    """Last lines of the section's output, if it crashed or was killed."""

    @property
    def failed(self) -> list[Line]:
        return [line for line in self.lines if line["kind"] == MUST and not line["ok"]]

    @property
    def skipped(self) -> list[Line]:
        return [line for line in self.lines if line["kind"] == SKIP]

    @property
    def why_not(self) -> str:
        """Reason why no part of the section ran; empty if any part ran."""
        skipped = self.skipped
        return str(skipped[0]["detail"]) if skipped and len(skipped) == len(self.lines) else ""


def not_run(section: Section, why: str) -> Outcome:
    line = {"section": section.label, "kind": SKIP, "what": "all of it", "ok": None, "value": None}
    return Outcome([{**line, "unit": None, "detail": why}], 0.0)


class Child:
    """Process of a section or of a program that a section starts, and its report."""

    def __init__(
        self,
        module: str,
        where: Path,
        environment: Mapping[str, str],
        *,
        label: str = "-",
        limit_s: float = float("inf"),
        gpus: int = 1,
    ) -> None:
        """Start the process.

        Args:
            module: see `section.main`.
            where: directory for the files of the process; becomes the variable WHERE.
            environment: additional environment variables.
            label, limit_s, gpus: see `section.main`.
        """
        where.mkdir(exist_ok=True)
        self.report = where / f"report-{time.monotonic_ns()}"
        self.report.touch()
        self._output = self.report.with_suffix(".out")
        self._output.touch()
        self.process = Process(
            "tools.gpu_check.section",
            [module, label, str(self.report), str(limit_s), str(gpus)],
            {**os.environ, "WHERE": str(where), **environment},
            self._output,
        )
        self.ended_at: float | None = None
        """Time at which the end was noticed, on the monotonic clock."""

    @property
    def status(self) -> int | None:
        """Exit status as of `subprocess`; None while the process runs."""
        return self.process.returncode

    def look(self, within_s: float = 0.0) -> bool:
        """Return whether the process ends within some seconds; record the time of the end."""
        if self.ended_at is None and self.process.wait(within_s) is not None:
            self.ended_at = time.monotonic()
        return self.ended_at is not None

    @property
    def output(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-_TAIL:])

    def lines(self) -> Iterator[Line]:
        """Yield the complete lines of the report; a process may be killed while it writes."""
        for line in self.report.read_text().splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def value(self, what: str) -> float | None:
        """Return the figure with the name `what`; None if it was not reported."""
        return next((line["value"] for line in self.lines() if line["what"] == what), None)

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
        child.process.kill()
        child.look()


def run(section: Section, package: str, limit_s: float) -> Outcome:
    """Run `section`; kill it and all its children after `limit_s`."""
    # Short: the path of an agent's socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="gc-", ignore_cleanup_errors=True) as where:
        started = time.monotonic()
        child = Child(
            f"{package}.{section.name}",
            Path(where),
            {"TMPDIR": where, **dict(section.environ)},
            label=section.label,
            limit_s=limit_s,
            gpus=section.gpus,
        )
        try:
            child.look(limit_s)
        finally:
            status = child.status
            left = _end(child.process, where)
        seconds = time.monotonic() - started
        with child.report.open("a") as stream:
            stream.write("\n")  # ends a line that the killed process has not completed
            _add(Report(section.label, stream), section, status, limit_s, left)
        return Outcome(list(child.lines()), seconds, child.output if status != 0 else "")


def _end(process: Process, where: str) -> list[int]:
    """Kill the process and all processes that it started; return the ids of its orphans.

    The forkserver kills the processes that it has forked for the section. Others, such as agents,
    may have sessions of their own, so they are found by their TMPDIR.
    """
    # List orphans before any kill, because /proc shows no environment of an ending process.
    orphans = list(_running_in(where)) if process.returncode is not None else []
    process.kill()
    process.close()
    deadline = time.monotonic() + _GONE_S
    while (left := list(_running_in(where))) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return orphans


def _running_in(where: str) -> Iterator[int]:
    marker = f"TMPDIR={where}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if marker in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)


def _add(
    report: Report, section: Section, status: int | None, limit_s: float, left: list[int]
) -> None:
    """Report what the section itself could not report."""
    if status is None and limit_s < section.seconds:
        report.skip("the rest of it", f"no time left: killed after {limit_s:.0f} s")
    elif status is None:
        report.must(f"ends within {limit_s:.0f} s", False, "killed, with all its children")
    elif status:
        report.must("runs to its end", False, f"exit status {status}")
    if left:
        report.note("processes that it left running and that were killed", str(len(left)))
