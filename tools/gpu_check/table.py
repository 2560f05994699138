"""Printed output: a line when a section has ended, then all facts, then a table to paste."""

from __future__ import annotations

from collections.abc import Iterator

from tools.gpu_check.process import Line, Outcome
from tools.gpu_check.report import FIGURE, HEADLINE, MUST, SKIP
from tools.gpu_check.sections import Section

Results = list[tuple[Section, Outcome]]


def ended(section: Section, outcome: Outcome) -> str:
    """Return the result of a section and its broken rules as text."""
    lines = [f"{section.label:3}{section.title}: {verdict(outcome)}, {outcome.seconds:.1f} s"]
    lines += [f"     FAILED: {line['what']}  {line['detail']}" for line in outcome.failed]
    lines += [f"     | {line}" for line in outcome.output.splitlines()]
    return "\n".join(lines)


def verdict(outcome: Outcome) -> str:
    """Return the verdict of a section in a few words."""
    rules = [line for line in outcome.lines if line["kind"] == MUST]
    if outcome.failed:
        return f"FAILED: {len(outcome.failed)} of {len(rules)} rules"
    if outcome.why_not:
        return f"not run: {outcome.why_not}"
    return f"ok, {len(rules)} rules" + (", parts not run" if outcome.skipped else "")


def facts(results: Results) -> str:
    """Return all facts as lines, aligned by column."""
    rows = [_row(line) for _, outcome in results for line in outcome.lines if line["kind"] != SKIP]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    padded = (
        [text.ljust(width) for text, width in zip(row, widths, strict=False)] + [row[3]]
        for row in rows
    )
    return "\n".join("  ".join(row).rstrip() for row in padded)


def _row(line: Line) -> tuple[str, str, str, str]:
    figure = _figure(line) if line["value"] is not None else ""
    value = {True: "ok", False: "FAILED", None: figure}[line["ok"]]
    # Some errors have several lines.
    return line["section"], line["what"], value, " ".join(line["detail"].split())


def _figure(line: Line) -> str:
    return f"{line['value']:.4g} {line['unit']}"


def summary(about: dict[str, str], results: Results) -> str:
    """Return a Markdown table of the machine, the verdicts, one figure each, and what is left."""
    lines = ["| gpu_check | |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in about.items()]
    lines += ["", "| section | verdict | figure | s |", "|---|---|---|---|"]
    for section, outcome in results:
        name = f"{section.label} {section.title}"
        figure = _headline(outcome)
        lines.append(f"| {name} | {verdict(outcome)} | {figure} | {outcome.seconds:.0f} |")
    if left := list(_left(results)):
        lines += ["", "| not run | why |", "|---|---|", *left]
    rules = [line for _, outcome in results for line in outcome.lines if line["kind"] == MUST]
    broken = [line for line in rules if not line["ok"]]
    lines.append("")
    lines += [f"FAILED {line['section']}: {line['what']}  {line['detail']}" for line in broken]
    return "\n".join([*lines, f"{len(rules)} rules checked, {len(broken)} broken"])


def _headline(outcome: Outcome) -> str:
    """Return the figure that stands for the section; without one its first figure."""
    for kind in (HEADLINE, FIGURE):
        for line in outcome.lines:
            if line["kind"] == kind:
                return f"{_figure(line)}: {line['what']}"
    return ""


def _left(results: Results) -> Iterator[str]:
    for section, outcome in results:
        for line in outcome.skipped:
            yield f"| {section.label} {section.title}: {line['what']} | {line['detail']} |"
