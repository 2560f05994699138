"""Texts with the figures of `python -m benchmarks train`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.train.figures import LABELS, Spread


def read_figures(path: Path) -> dict[str, Any]:
    """Return the figures that an earlier run wrote.

    Raises:
        SystemExit: the file does not hold figures of such a run.
    """
    try:
        results = json.loads(path.read_text())
        return next(
            result for result in results if isinstance(result, dict) and "systems" in result
        )
    except (OSError, ValueError, StopIteration) as error:
        raise SystemExit(
            f"{path}: not the figures of `python -m benchmarks train` ({error!r})"
        ) from error


def measured_labels(figures: dict[str, Any]) -> dict[str, str]:
    """Return those of `LABELS` of which at least one system has a figure."""
    measured = {name for system in figures["systems"].values() for name in system["figures"]}
    return {name: label for name, label in LABELS.items() if name in measured}


def cells(figures: dict[str, Any]) -> list[list[str]]:
    """Return the table's rows: label, the figures of `measured_labels`, number of rounds."""
    rows = []
    for system in figures["systems"].values():
        row = [system["label"]]
        for name in measured_labels(figures):
            value = system["figures"].get(name)
            hidden = value is None or (not system["saves"] and name not in _OF_BASELINES)
            row.append("-" if hidden else str(Spread(**value)))
        rows.append([*row, str(len(system["rounds"]))])
    return rows


#: Figures of a run without saves.
_OF_BASELINES = ("first_save_step_s", "exit_s")


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
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"{machine['file_system']}, Linux {kernel}; {versions}; {figures['started']}"
    )


def rounds_of(figures: dict[str, Any]) -> str:
    """Return a description of the figures: one round, or medians."""
    if figures["rounds"] == 1:
        return "one round"
    return f"medians of {figures['rounds']} interleaved rounds (least to most)"


def markdown(figures: dict[str, Any]) -> str:
    """Return the table for a document, with a line about the run below it."""
    header = ["", *measured_labels(figures).values(), "rounds"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in cells(figures)]
    schedule = figures["schedule"]
    steps = ", ".join(f"{seconds:.2f} s" for seconds in usual_steps(figures).values())
    lines += [
        "",
        f"Seconds. {figures['ranks']} ranks, a save every {schedule['interval']} steps; "
        f"{rounds_of(figures)}; a step without a save: {steps}. "
        f"{machine_line(figures)}; {figures['seconds']} s in all.",
    ]
    lines += [f"\n{name} was left out: {why}." for name, why in figures["left_out"].items()]
    return "\n".join(lines)
