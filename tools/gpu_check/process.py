"""Process of one section, with everything that it starts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.gpu_check.forkserver import ROOT, Process
from tools.gpu_check.report import MUST, SKIP, Report
from tools.gpu_check.sections import Section

#: Seconds that a killed process may take to end; inside the GPU's driver it takes seconds.
_GONE_S = 10.0
#: Number of last lines of a crashed section's output that are kept.
_TAIL = 30

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a section."""

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
    """Return the result of a section that is not started."""
    line = {"section": section.label, "kind": SKIP, "what": "all of it", "ok": None, "value": None}
    return Outcome([{**line, "unit": None, "detail": why}], 0.0)


def run(section: Section, package: str, limit_s: float) -> Outcome:
    """Run `section`; kill it and all its children after `limit_s`."""
    # Short: the path of an agent's socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="gc-", ignore_cleanup_errors=True) as where:
        to, output = Path(where, "report"), Path(where, "output")
        to.touch()
        started = time.monotonic()
        arguments = [f"{package}.{section.name}", section.label, str(to), str(limit_s)]
        process = Process(
            "tools.gpu_check.section",
            [*arguments, str(section.gpus)],
            _environment(section, where),
            output,
        )
        try:
            status = process.wait(limit_s)
        finally:
            left = _end(process, where)
        seconds = time.monotonic() - started
        with to.open("a") as stream:
            stream.write("\n")  # ends a line that the killed process has not completed
            _add(Report(section.label, stream), section, status, limit_s, left)
        lines = list(_whole_lines(to))
        tail = output.read_text(errors="replace").splitlines()[-_TAIL:] if status != 0 else []
        return Outcome(lines, seconds, "\n".join(tail))


def _environment(section: Section, where: str) -> dict[str, str]:
    """Return the driver's environment without settings of the package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHCKPT_")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, "TMPDIR": where, **dict(section.environ)}


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


def _whole_lines(file: Path) -> Iterator[Line]:
    """Yield the complete lines of a report; a process may be killed while it writes."""
    for line in file.read_text().splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
