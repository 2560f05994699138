"""Charts of studies: rows of panels with a bar for each value. Needs matplotlib."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.study import Result, Table

_OURS, _OTHERS, _LIMIT = "#1b7f5c", "#9aa5b1", "#c0392b"


@dataclasses.dataclass(frozen=True)
class Panel:
    """Bars of one figure, from top to bottom. Labels with "flashckpt" are this package's."""

    title: str
    labels: Sequence[str]
    values: Sequence[float]
    limit: float | None = None
    """Value of a dashed line."""
    spread: Sequence[tuple[float, float]] = ()
    """Least and most of each value."""


def draw(rows: Sequence[Sequence[Panel]], path: Path, title: str = "") -> None:
    """Draw the panels; those of a row have the same bars."""
    heights = [1.5 + 0.4 * max(len(panel.labels) for panel in row) for row in rows]
    width = max(8, 5.5 * max(map(len, rows)))
    figure = pyplot.figure(figsize=(width, sum(heights) + 0.5), layout="constrained")
    parts = figure.subfigures(len(rows), height_ratios=heights, squeeze=False)
    for row, (part,) in zip(rows, parts, strict=True):
        for panel, axis in zip(row, part.subplots(1, len(row), squeeze=False)[0], strict=True):
            colours = [_OURS if "flashckpt" in label else _OTHERS for label in panel.labels]
            labels = [label.replace(", ", ",\n", 1) for label in panel.labels]
            positions = range(len(labels))
            pairs = list(zip(panel.values, panel.spread, strict=False))
            below, above = ([abs(ends[at] - value) for value, ends in pairs] for at in (0, 1))
            spread = [below, above] if pairs else None
            bars = axis.barh(positions, panel.values, color=colours, xerr=spread, capsize=3)
            axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
            axis.set_yticks(positions, labels, fontsize=8)
            axis.invert_yaxis()
            axis.set_title(panel.title, loc="left", fontsize=8, wrap=True)
            axis.margins(x=0.15)
            axis.spines[["top", "right"]].set_visible(False)
            if panel.limit is not None:
                axis.axvline(panel.limit, color=_LIMIT, linewidth=1, linestyle="--")
    figure.suptitle(title, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_tables(results: Sequence[Result], path: Path) -> None:
    """Draw all columns of tables that hold numbers, one below the other."""
    rows = []
    for table in (result for result in results if isinstance(result, Table)):
        for at, column in enumerate(table.columns):
            numbers = [row for row in table.rows if isinstance(row[at], int | float)]
            if numbers:
                labels = [_name(row) for row in numbers]
                values = [row[at] for row in numbers]
                rows.append([Panel(f"{table.title}\n{column}", labels, values)])
    if rows:
        draw(rows, path)


def _name(row: tuple[object, ...]) -> str:
    """Return the leading texts of a row, joined."""
    count = next((at for at, value in enumerate(row) if not isinstance(value, str)), len(row))
    return ", ".join(map(str, row[:count]))
