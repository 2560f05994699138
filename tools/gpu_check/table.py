"""Printed output: the facts of each section when it has ended, then a table to paste."""

from __future__ import annotations

from collections.abc import Iterator

from tools.gpu_check.process import Line, Outcome
from tools.gpu_check.report import FIGURE, HEADLINE, MUST
from tools.gpu_check.sections import Section

Results = list[tuple[Section, Outcome]]


def ended(section: Section, outcome: Outcome) -> str:
    """Return the result of a section, its facts, and the output of a crash as text."""
    lines = [f"{section.label:3}{section.title}: {verdict(outcome)}, {outcome.seconds:.1f} s"]
    for line in outcome.lines:
        figure = _figure(line) if line["value"] is not None else ""
        value = {True: "ok", False: "FAILED", None: figure}[line["ok"]]
        # Some errors have several lines.
        detail = " ".join(line["detail"].split())
        lines.append(f"     {line['what']:70} {value:12} {detail}".rstrip())
    lines += [f"     | {line}" for line in outcome.output.splitlines()]
    return "\n".join(lines)


def verdict(outcome: Outcome) -> str:
    rules = [line for line in outcome.lines if line["kind"] == MUST]
    if outcome.failed:
        return f"FAILED: {len(outcome.failed)} of {len(rules)} rules"
    if outcome.why_not:
        return f"not run: {outcome.why_not}"
    return f"ok, {len(rules)} rules" + (", parts not run" if outcome.skipped else "")


def _figure(line: Line) -> str:
    return f"{line['value']:.4g} {line['unit']}"


def summary(about: dict[str, str], results: Results) -> str:
    """Return a Markdown table of the machine, the verdicts, main figures, and what is left."""
    lines = ["| gpu_check | |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in about.items()]
    lines += ["", "| section | verdict | figure | s |", "|---|---|---|---|"]
    for section, outcome in results:
        name = f"{section.label} {section.title}"
        figure, *others = _headlines(outcome) or [""]
        lines.append(f"| {name} | {verdict(outcome)} | {figure} | {outcome.seconds:.0f} |")
        lines += [f"| | | {other} | |" for other in others]
    if left := list(_left(results)):
        lines += ["", "| not run | why |", "|---|---|", *left]
    rules = [line for _, outcome in results for line in outcome.lines if line["kind"] == MUST]
    broken = [line for line in rules if not line["ok"]]
    lines.append("")
    lines += [f"FAILED {line['section']}: {line['what']}  {line['detail']}" for line in broken]
    return "\n".join([*lines, f"{len(rules)} rules checked, {len(broken)} broken"])


def _headlines(outcome: Outcome) -> list[str]:
    """Return the figures that stand for the section, each with the first clause of its detail.

    Without one, return the section's first figure.
    """
    lines = {
        kind: [ln for ln in outcome.lines if ln["kind"] == kind] for kind in (HEADLINE, FIGURE)
    }
    return [
        f"{_figure(line)}: {line['what']}" + (detail and f" ({detail})")
        for line in lines[HEADLINE] or lines[FIGURE][:1]
        for detail in [line["detail"].partition(";")[0]]
    ]


def _left(results: Results) -> Iterator[str]:
    for section, outcome in results:
        for line in outcome.skipped:
            yield f"| {section.label} {section.title}: {line['what']} | {line['detail']} |"
