"""Loads after a restart, in the layout that was saved: from memory, and from storage.

One job saves once; another one, as after a crash, loads again and again. Each load takes turns with
its limit (`compare.loads`): a plain copy of the same bytes for loads from memory, a plain read for
those from storage. A load counts from its call to its return on the last rank: the talk with
the agent, planning, agreement of all ranks, reading, and the check of every digest.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare.driver import Size, run_job
from benchmarks.compare.report import LOADS, load_share, median

_MS = 1000
#: What `System.watch_load` tells of ours.
PARTS = ("copied", "digested")


def bench_restart(
    out: Console, root: Path, sizes: list[int], ranks: int, rounds: int, system: str
) -> None:
    """Print, for each size and source, the times of loads and what part their limit takes."""
    table = Table("state of a rank", "from", "limit, ms", "load, ms", "first", "CPU", "share of it")
    for part in (*PARTS, "rest"):
        table.add_column(part)
    table.box = None
    for mib in sizes:
        size = Size(mib=mib, ranks=ranks, loads=rounds)
        with tempfile.TemporaryDirectory(dir=root) as directory:
            run_job("save-once", [system], size, Path(directory))
            results = run_job("load", [system], size, Path(directory))
        found = results["systems"][system]
        for error in found["errors"]:
            out.print(error)
        for how in LOADS:
            table.add_row(f"{results['rank_nbytes'] / 2**20:.0f} MiB", how, *_cells(found, how))
    out.print(
        f"{system}, {ranks} ranks, same layout; medians of {rounds} loads; limit: a plain read or "
        "copy of the same bytes right before; first: the first load of its kind; CPU: of one rank, "
        "ms; share: limit / load (least - most); copied: by the kernel, waiting for disks "
        "included; digested: each on its slowest rank, all its threads together, ms; rest: of the "
        "load, but for the two"
    )
    out.print(table)


def _cells(found: dict[str, Any], how: str) -> list[str]:
    took, limits = found.get(f"{how}_s"), found.get(f"{how}_limit_s")
    if not took:
        return ["-"] * (6 + len(PARTS))
    shares = [limit / load for limit, load in zip(limits, took, strict=True)]
    parts = [found[f"{how}_{part}_s"] for part in PARTS]
    rest = [whole - sum(of_it) for whole, *of_it in zip(took, *parts, strict=True)]
    return [
        f"{_MS * median(limits):.0f}",
        f"{_MS * median(took):.0f}",
        f"{_MS * took[0]:.0f}",
        f"{_MS * median(found[f'{how}_cpu_s']):.0f}",
        f"{load_share(found, how):.2f} ({min(shares):.2f} - {max(shares):.2f})",
        *(f"{_MS * median(seconds):.0f}" for seconds in parts),
        # Several threads work at the same time: what they took together is no part of the whole.
        f"{_MS * median(rest):.0f}" if median(rest) > 0 else "-",
    ]
