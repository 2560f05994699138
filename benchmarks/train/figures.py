"""Arithmetic of `python -m benchmarks train`: the cost of a save, from wall-clock times."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.train.measure import RESUMED_STEPS, Losses, Measured
from benchmarks.train.sizes import Schedule

#: Labels of the reported figures of a round, by their names in the JSON file.
LABELS = {
    "blocked_s": "blocked per save",
    "lost_per_save_s": "lost per save",
    "first_save_step_s": "first save's step",
    "durable_s": "durable",
    "lost_in_all_s": "lost in all",
    "exit_s": "exit",
    "storage_load_s": "load: storage",
    "memory_load_s": "load: memory",
    "storage_restart_s": "restart: storage",
    "memory_restart_s": "restart: memory",
    "host_gb": "host memory, GB",
    "gb": "GB",
}


def differing(expected: Losses, losses: Losses, iterations: Sequence[int]) -> list[int]:
    """Return those of `iterations` whose losses are missing or differ."""
    return [
        number
        for number in iterations
        if number not in expected or losses.get(number) != expected[number]
    ]


def objections(schedule: Schedule, run: Measured, baseline: Measured) -> list[str]:
    """Return reasons to reject a run, from a comparison with the same run without saves."""
    reasons = []
    every = range(1, schedule.iterations + 1)
    if wrong := differing(baseline.losses, run.losses, every):
        reasons.append(f"trained otherwise than without saves from iteration {wrong[0]} on")
    for source, restart in run.restarts.items():
        first = restart.resumed_from + 1
        steps = range(first, first + RESUMED_STEPS)
        # If ranks saved again after a restart, they were killed one step after that save.
        if wrong := differing(baseline.losses, restart.losses, steps):
            reasons.append(f"resumed from {source} with another loss in iteration {wrong[0]}")
    return reasons


def lost_per_save(schedule: Schedule, run: Measured, baseline: Measured) -> float | None:
    """Return the seconds that each save after the first costs the training loop.

    The time runs from the end of the iteration before the second save to the end of the last
    iteration, in both runs; the last save comes after it. The difference is divided by the number
    of saves that were made in that time, because a system may skip some.
    """
    begin, end = schedule.saved_at[1], schedule.iterations
    made = [number for number in schedule.saved_at[1:] if number in run.saved]
    if not made:
        return None
    seconds = [measured.ended_at[end] - measured.ended_at[begin] for measured in (run, baseline)]
    return (seconds[0] - seconds[1]) / len(made)


def lost_in_all(run: Measured, baseline: Measured) -> float:
    """Return the additional seconds of the run, from the start of its ranks to its end."""
    seconds = [max(measured.ended_at.values()) + measured.exit_s for measured in (run, baseline)]
    return seconds[0] - seconds[1]


def first_save_step_s(schedule: Schedule, run: Measured) -> float:
    """Return the wall clock of the step that begins with the first save."""
    first = schedule.interval
    return run.ended_at[first + 1] - run.ended_at[first]


def usual_step_s(baseline: Measured) -> float:
    """Return the median of a step without saves; the first two are slower."""
    ends = [at for _, at in sorted(baseline.ended_at.items())][1:]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def figures_of(schedule: Schedule, run: Measured, baseline: Measured) -> dict[str, float | None]:
    """Return the figures of a system in one round, by the names of `LABELS`."""
    figures: dict[str, float | None] = {
        "lost_per_save_s": lost_per_save(schedule, run, baseline),
        "first_save_step_s": first_save_step_s(schedule, run),
        "lost_in_all_s": lost_in_all(run, baseline),
        "exit_s": run.exit_s,
        "host_gb": run.peak_nbytes / 1e9,
        "gb": run.nbytes / 1e9,
        "blocked_s": statistics.median(run.blocked_s[1:]) if run.blocked_s[1:] else None,
        "durable_s": statistics.median(run.durable_s[1:]) + run.owed_s
        if run.durable_s[1:]
        else None,
    }
    for source, restart in run.restarts.items():
        figures[f"{source}_load_s"] = restart.load_s
        figures[f"{source}_restart_s"] = restart.first_step_s
    return figures


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and most of a figure over the rounds."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def spreads(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each measured figure over a system's rounds."""
    result = {}
    for name in LABELS:
        values = [figures[name] for figures in rounds if figures.get(name) is not None]
        if values:
            result[name] = spread(values)
    return result
