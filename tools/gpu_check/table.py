"""Printed output: progress while sections run, and a table of all facts at the end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tools.gpu_check.discovery import Section
from tools.gpu_check.process import Line, Outcome
from tools.gpu_check.report import FIGURE, MUST, SKIP

#: Width of a table that goes to a file.
_WIDTH = 150


class Output:
    """Output on stdout: progress and colours on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        width = None if sys.stdout.isatty() else _WIDTH
        self._console = Console(width=width, highlight=False, soft_wrap=not sys.stdout.isatty())

    @contextlib.contextmanager
    def running(self, section: Section, limit_s: float) -> Iterator[None]:
        """Show progress while a section runs."""
        if not self._console.is_terminal:
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            text = f"{section.label}  {section.title} (at most {limit_s:.0f} s)"
            progress.add_task(text, total=None)
            yield

    def ended(self, section: Section, outcome: Outcome) -> None:
        """Print the result of a section, and its broken rules."""
        verdict = "FAILED" if outcome.failed else outcome.why_not or "ok"
        self._print(f"{section.label:3}{section.title}: {verdict}, {outcome.seconds:.1f} s")
        for line in outcome.failed:
            self._print(f"     FAILED: {line['what']}  {line['detail']}")
        if outcome.output:
            self._print("\n".join(f"     | {line}" for line in outcome.output.splitlines()))

    def table(self, lines: list[Line]) -> None:
        """Print all facts."""
        table = Table(box=None, pad_edge=False)
        for heading in ("", "what", "figure", "", "verdict", "detail"):
            table.add_column(heading, justify="right" if heading == "figure" else "left")
        for line in lines:
            if line["kind"] != SKIP:
                table.add_row(*map(Text, _row(line)))
        self._print("")
        self._console.print(table)

    def skipped(self, skipped: list[tuple[str, str]]) -> None:
        """Print the sections and parts that did not run, with the reasons."""
        if skipped:
            self._print("\nnot run:")
        for name, why in skipped:
            self._print(f"  {name}: {why}")

    def verdict(self, lines: list[Line]) -> None:
        """Print the broken rules, and the number of rules in the last line."""
        musts = [line for line in lines if line["kind"] == MUST]
        broken = [line for line in musts if not line["ok"]]
        self._print("")
        for line in broken:
            self._print(f"FAILED {line['section']}: {line['what']}  {line['detail']}")
        self._print(f"{len(musts)} rules checked, {len(broken)} broken")

    def _print(self, text: str) -> None:
        self._console.print(Text(text))


def _row(line: Line) -> tuple[str, ...]:
    figure = f"{line['value']:.4g} {line['unit']}" if line["kind"] == FIGURE else ""
    verdict = {True: "ok", False: "FAILED", None: ""}[line["ok"]]
    kind = "MUST" if line["kind"] == MUST else "note"
    detail = " ".join(line["detail"].split())  # some errors have several lines
    return line["section"], line["what"], figure, kind, verdict, detail
