"""Chart of `python -m benchmarks train`: the cost of a save, and the step with the first save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chart import Panel, draw
from benchmarks.study import Result
from benchmarks.train.report import machine_line, ranks_of, rounds_of, usual_steps

_FIRST = "first_save_step_s"
_TITLES = {
    "lost_per_save_s": "training lost per save, s",
    "blocked_s": "blocked per save, s",
    _FIRST: "step with the first save, s; dashed: a step without a save",
    "storage_load_s": "load from storage, s",
}


def draw_figures(results: Sequence[Result], path: Path) -> None:
    """Draw the figures of a run, a row for each model in which a system saved."""
    runs = [run for run in results if isinstance(run, dict)]
    if rows := [row for row in map(_panels, runs) if row[0].labels]:
        title = "\n".join(f"{_name(run)}; {rounds_of(run)}\n{machine_line(run)}" for run in runs)
        draw(rows, path, title)


def _panels(figures: dict[str, Any]) -> list[Panel]:
    # With slow storage a run has few saves, and steps scatter more than they lose.
    is_slow = figures.get("storage_mb_s")
    keys = ("blocked_s", _FIRST, "storage_load_s") if is_slow else ("lost_per_save_s", _FIRST)
    systems = [
        system
        for system in figures["systems"].values()
        if system["saves"] and all(key in system["figures"] for key in keys)
    ]
    usual = next(iter(usual_steps(figures).values()), None)
    panels = []
    for key in keys:
        spreads = [system["figures"][key] for system in systems]
        panels.append(
            Panel(
                _TITLES[key],
                [system["label"] for system in systems],
                [spread["median"] for spread in spreads],
                usual if key == _FIRST else None,
                [(spread["least"], spread["most"]) for spread in spreads],
            )
        )
    return panels


def _name(figures: dict[str, Any]) -> str:
    """Return what was measured: the job, and what limits its storage."""
    name = f"{ranks_of(figures)}, a save every {figures['schedule']['interval']} steps"
    if limit := figures.get("storage_mb_s"):
        used = "with" if figures.get("distributed_optimizer", True) else "without"
        name += f", storage of {limit:g} MB/s, {used} Megatron's distributed optimizer"
    return name
