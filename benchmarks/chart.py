"""Chart of a study's tables: a bar for each row of each column of numbers. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.study import Table


def draw(tables: Sequence[Table], path: Path) -> None:
    """Draw all columns that hold numbers, table by table from top to bottom."""
    fields = [
        (table, number)
        for table in tables
        for number, _ in enumerate(table.columns)
        if any(_is_number(row[number]) for row in table.rows)
    ]
    if not fields:
        return
    heights = [1 + 0.3 * len(table.rows) for table, _ in fields]
    figure, axes = pyplot.subplots(
        len(fields),
        figsize=(8, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for (table, number), (axis,) in zip(fields, axes, strict=True):
        rows = [row for row in table.rows if _is_number(row[number])]
        positions = range(len(rows))
        axis.barh(positions, [row[number] for row in rows])
        axis.set_yticks(positions, [_name(row) for row in rows])
        axis.set_ylabel(_names(table, rows[0]), fontsize=8)
        axis.invert_yaxis()
        axis.set_title(
            f"{table.title}\n{list(table.columns)[number]}", loc="left", fontsize=8, wrap=True
        )
    figure.savefig(path)
    pyplot.close(figure)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _name(row: tuple[object, ...]) -> str:
    """Return the leading texts of a row, joined."""
    texts = []
    for value in row:
        if not isinstance(value, str):
            break
        texts.append(value)
    return ", ".join(texts)


def _names(table: Table, row: tuple[object, ...]) -> str:
    """Return the titles of the columns that `_name` joins."""
    count = next((at for at, value in enumerate(row) if not isinstance(value, str)), len(row))
    return ", ".join(list(table.columns)[:count])
