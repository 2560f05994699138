"""The chart of `scripts/bench save`. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.compare.report import raw_write_s, summary

matplotlib.use("Agg")
from matplotlib import pyplot

_OURS, _OTHERS, _LIMIT = "#1b7f5c", "#9aa5b1", "#c0392b"
_PANELS = (
    ("blocked_s", "a save blocks training, s", None),
    ("training_lost_s", "training lost per save, s", None),
    ("durable_s", "durable after, s", "raw"),
    ("cpu_s_per_gb", "CPU s per GB", None),
    ("warm_s", "load, page cache warm, s", "read_warm_s"),
    ("memory_s", "load from memory, s", None),
)


def chart(results: dict[str, Any], path: Path) -> None:
    """Draw one bar per system and figure; a line is the limit of the machine."""
    rows = {name: summary(results, name) for name in results["systems"]}
    figure, axes = pyplot.subplots(2, 3, figsize=(17, 8), layout="constrained")
    for axis, (key, title, limit) in zip(axes.flat, _PANELS, strict=True):
        shown = {name: row[key] for name, row in reversed(rows.items()) if row[key] is not None}
        colours = [_OURS if name.startswith("flashckpt") else _OTHERS for name in shown]
        labels = [results["labels"].get(name, name).replace(", ", ",\n", 1) for name in shown]
        bars = axis.barh(labels, list(shown.values()), color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
        at = _limit(results, limit)
        if at is not None:
            axis.axvline(at, color=_LIMIT, linewidth=1, linestyle="--")
    size, machine = results["size"], results["machine"]
    figure.suptitle(
        f"{_message(rows)}\n"
        f"{size['ranks']} ranks x {results['rank_nbytes'] / 1e6:.0f} MB in {results['pieces']} "
        f"tensors; {machine['cores']} cores, {machine['file_system']}; {results['started']}; "
        "dashed: a plain write or read of the same bytes",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _limit(results: dict[str, Any], name: str | None) -> float | None:
    if name == "raw":
        return raw_write_s(results)
    values = results["limits"].get(name or "")
    return sorted(values)[len(values) // 2] if values else None


def _message(rows: dict[str, dict[str, Any]]) -> str:
    """Return what the chart shows first: how long a save blocks, here and in the best other one."""
    others = [
        row["blocked_s"]
        for name, row in rows.items()
        if not name.startswith("flashckpt") and row["blocked_s"] is not None
    ]
    ours = rows.get("flashckpt", {}).get("blocked_s")
    if ours is None or not others:
        return "Saves and loads of the same tensors"
    return (
        f"The same tensors in {len(rows)} systems: a save of this package blocks training for "
        f"{1e3 * ours:.0f} ms, that of the others for {1e3 * min(others):.0f} ms and more"
    )
