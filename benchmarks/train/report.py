"""Texts with the figures of `python -m benchmarks train`."""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.study import Table
from benchmarks.train.figures import LABELS


def read_figures(path: Path) -> list[dict[str, Any]]:
    """Return the figures that an earlier run wrote, one for each model.

    Raises:
        SystemExit: the file does not hold figures of such a run.
    """
    try:
        results = json.loads(path.read_text())
        figures = [entry for entry in results if isinstance(entry, dict) and "systems" in entry]
        if figures:
            return figures
        reason = "no figures"
    except (OSError, ValueError) as error:
        reason = repr(error)
    raise SystemExit(f"{path}: not the figures of `python -m benchmarks train` ({reason})")


def measured_labels(figures: dict[str, Any]) -> dict[str, str]:
    """Return those of `LABELS` of which at least one system has a figure that is to be shown."""
    shown = figures.get("columns", LABELS)
    measured = {name for system in figures["systems"].values() for name in system["figures"]}
    return {name: label for name, label in LABELS.items() if name in measured and name in shown}


def cells(figures: dict[str, Any]) -> list[list[str]]:
    """Return the table's rows: label, the figures of `measured_labels`, number of rounds."""
    rows = []
    for system in figures["systems"].values():
        row = [system["label"]]
        for name in measured_labels(figures):
            value = system["figures"].get(name)
            hidden = value is None or (not system["saves"] and name not in _OF_BASELINES)
            row.append("-" if hidden else _spread(**value))
        if failed := system.get("failed"):
            # In place of the first figure.
            row[1:2] = [failed.splitlines()[0]]
        rows.append([*row, str(len(system["rounds"]))])
    return rows


def _spread(median: float, least: float, most: float) -> str:
    return f"{median:.2f}" + (f" ({least:.2f} to {most:.2f})" if least < most else "")


#: Figures of a run without saves.
_OF_BASELINES = ("first_save_step_s", "exit_s", "host_gb")


def usual_steps(figures: dict[str, Any]) -> dict[str, float]:
    """Return the median seconds of a step, by the name of the run without saves."""
    return {
        name: statistics.median(system["usual_step_s"])
        for name, system in figures["systems"].items()
        if system["usual_step_s"]
    }


def machine_line(figures: dict[str, Any]) -> str:
    """Return a line with the properties of the machine on which the figures depend."""
    machine = figures["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    kernel, _, _ = machine["kernel"].partition("-")
    gpu = f"{machine['gpu']}; " if machine.get("gpu") else ""
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"{machine['file_system']}, Linux {kernel}; {versions}; {figures['started']}"
    )


def ranks_of(figures: dict[str, Any]) -> str:
    """Return a description of the job: its ranks, and for a GPU its model."""
    if figures["ranks"] > 1:
        return f"{figures['ranks']} ranks"
    model = re.sub(r"^([\d.]+)b$", r"\1 billion parameters", figures["size"])
    return f"one rank, {model}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def rounds_of(figures: dict[str, Any]) -> str:
    if figures["rounds"] == 1:
        return "one round"
    return f"medians of {figures['rounds']} interleaved rounds (least to most)"


def document(runs: list[dict[str, Any]]) -> str:
    return "\n\n".join(map(markdown, runs))


def markdown(figures: dict[str, Any]) -> str:
    """Return the table for a document, with lines about the run and its failures below it."""
    table = table_of(figures)
    header, *rows = ("| " + " | ".join(row) + " |" for row in (table.columns, *table.rows))
    lines = [header, "|---" * len(table.columns) + "|", *rows]
    schedule = figures["schedule"]
    steps = ", ".join(f"{seconds:.2f} s" for seconds in usual_steps(figures).values())
    lines += [
        "",
        f"Seconds. {_capital(ranks_of(figures))}, a save every {schedule['interval']} steps; "
        f"{rounds_of(figures)}; a step without a save: {steps}. "
        f"{machine_line(figures)}; {figures['seconds']} s in all.",
    ]
    lines += [f"\n{name} was left out: {why}." for name, why in figures["left_out"].items()]
    for system in figures["systems"].values():
        first, *log = (system.get("failed") or "").splitlines() or [""]
        if log:
            tail = textwrap.dedent("\n".join(log))
            lines += ["", f"{system['label']}, {first}:", "", "```text", tail, "```"]
    return "\n".join(lines)


def table_of(figures: dict[str, Any]) -> Table:
    labels = {name: system["label"] for name, system in figures["systems"].items()}
    steps = [f"{seconds:.2f} s ({labels[name]})" for name, seconds in usual_steps(figures).items()]
    return Table(
        f"{_capital(ranks_of(figures))}; seconds, {rounds_of(figures)}; a step: {', '.join(steps)}",
        {"": "", **dict.fromkeys(measured_labels(figures).values(), ""), "rounds": ""},
        [tuple(row) for row in cells(figures)],
    )
