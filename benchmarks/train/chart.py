"""Chart of `python -m benchmarks train`: the cost of a save, and the step with the first save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import SubFigure

from benchmarks.study import Result
from benchmarks.train.report import machine_line, ranks_of, rounds_of, usual_steps

_OURS, _OTHERS, _LIMIT = "#1b7f5c", "#9aa5b1", "#c0392b"
_LOST, _BLOCKED, _FIRST, _LOAD = (
    ("lost_per_save_s", "training lost per save (seconds)"),
    ("blocked_s", "blocked per save (seconds)"),
    ("first_save_step_s", "step with the first save (seconds)"),
    ("storage_load_s", "load from storage (seconds)"),
)


def draw_figures(results: Sequence[Result], path: Path) -> None:
    """Draw the figures of a run, a row for each model in which a system saved."""
    runs = [run for run in results if isinstance(run, dict) and _systems(run)]
    if not runs:
        return
    heights = [1.8 + 0.62 * len(_systems(run)) for run in runs]
    figure = pyplot.figure(figsize=(11, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(runs), height_ratios=heights, squeeze=False)
    for run, (part,) in zip(runs, parts, strict=True):
        _draw(run, part)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panels(figures: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    # With slow storage a run has few saves, and steps scatter more than they lose.
    return (_BLOCKED, _FIRST, _LOAD) if figures.get("storage_mb_s") else (_LOST, _FIRST)


def _systems(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the systems of which every panel has a figure."""
    return {
        name: system
        for name, system in figures["systems"].items()
        if system["saves"] and all(key in system["figures"] for key, _ in _panels(figures))
    }


def _draw(figures: dict[str, Any], part: SubFigure) -> None:
    panels, systems = _panels(figures), _systems(figures)
    labels = [system["label"].replace(", ", ",\n", 1) for system in systems.values()]
    colours = [_OURS if name == "flashckpt" else _OTHERS for name in systems]
    axes = part.subplots(1, len(panels), sharey=True)
    for axis, (key, title) in zip(axes, panels, strict=True):
        values = [system["figures"][key] for system in systems.values()]
        medians = [value["median"] for value in values]
        spread = [
            [value["median"] - value["least"] for value in values],
            [value["most"] - value["median"] for value in values],
        ]
        axis.barh(range(len(values)), medians, color=colours, height=0.62)
        axis.errorbar(
            medians, range(len(values)), xerr=spread, fmt="none", ecolor="#333333", capsize=3
        )
        for position, value in enumerate(values):
            axis.annotate(
                f"{value['median']:.2f} s",
                (max(value["most"], 0), position),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=10,
            )
        most = max(value["most"] for value in values)
        axis.set_xlim(min([0, *(value["least"] for value in values)]), 1.2 * most)
        axis.set_yticks(range(len(values)), labels, fontsize=10)
        axis.set_xlabel(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    if steps := usual_steps(figures):
        usual = next(iter(steps.values()))
        axis = axes[panels.index(_FIRST)]
        axis.axvline(usual, color=_LIMIT, linewidth=1, linestyle="--")
        axis.set_title(f"dashed: a step without a save, {usual:.2f} s", fontsize=9, loc="right")
    size = max((system["figures"]["gb"]["median"] for system in systems.values()), default=0)
    schedule = figures["schedule"]
    part.suptitle(
        f"What checkpoints cost real Megatron training: {ranks_of(figures)}, "
        f"{size:.2f} GB every {schedule['interval']} steps"
        f"{_storage(figures)}{_optimizer(figures)}",
        fontsize=12,
    )
    part.supxlabel(
        f"{rounds_of(figures)}\n{machine_line(figures)}",
        fontsize=7,
    )


def _storage(figures: dict[str, Any]) -> str:
    """Return the limit of the storage bandwidth, or nothing."""
    limit = figures.get("storage_mb_s")
    return f", storage of {limit:g} MB/s" if limit else ""


def _optimizer(figures: dict[str, Any]) -> str:
    """Return whether the state is sharded over the replicas, if runs of both kinds exist."""
    if not figures.get("storage_mb_s"):
        return ""
    used = "with" if figures.get("distributed_optimizer", True) else "without"
    return f"\n{used} Megatron's distributed optimizer"
