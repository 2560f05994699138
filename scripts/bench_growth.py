"""How each cost of a save and a load grows with the state, the number of tensors, and the ranks."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import psutil
from bench_save import Size, measure
from bench_save_report import summary
from rich.console import Console
from rich.table import Table

_USUAL = Size(mib=64, pieces=296, ranks=2, saves=5, train_saves=0, loads=2)
_STEPS: dict[str, tuple[float, ...]] = {
    "mib": (64, 256, 1024, 4096),
    "pieces": (100, 1000, 5000, 20_000),
    "ranks": (1, 2, 4, 8),
}
#: The state, what a memcpy takes it to, two slots, and the pages of the file.
_COPIES = 5
_COLUMNS = {
    "first blocked, ms": ("first_blocked_s", 1000),
    "blocked, ms": ("blocked_s", 1000),
    "all copied, ms": ("settled_s", 1000),
    "x memcpy": ("settled_over_memcpy", 1),
    "durable, s": ("durable_s", 1),
    "CPU s per GB": ("cpu_s_per_gb", 1),
    "load warm, s": ("warm_s", 1),
    "from memory, s": ("memory_s", 1),
}


def bench_growth(
    out: Console, where: Path | None, steps: list[str], json_path: Path | None
) -> None:
    """Print one table per quantity that grows; the others stay as they are."""
    measured: dict[str, list[dict[str, Any]]] = {}
    for what in steps:
        table = Table(what, *_COLUMNS, title=f"growing: {what}", title_justify="left", box=None)
        for value in _STEPS[what]:
            size = dataclasses.replace(_USUAL, **{what: type(getattr(_USUAL, what))(value)})
            needed = _COPIES * size.mib * size.ranks * 2**20
            if needed > psutil.virtual_memory().available:
                table.add_row(f"{value:g}", f"needs {needed / 2**30:.0f} GiB of memory")
                continue
            with tempfile.TemporaryDirectory(dir=where, prefix="fc") as root:
                results = measure(out, ["flashckpt"], size, Path(root))
            measured.setdefault(what, []).append(results)
            row = summary(results, "flashckpt")
            table.add_row(f"{value:g}", *(_cell(row[key], by) for key, by in _COLUMNS.values()))
        out.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(measured, indent=1) + "\n")


def _cell(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:.3g}"
