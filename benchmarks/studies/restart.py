"""Loads after a restart under the same parallel layout, from memory and from storage.

One job saves once. A second job, as after a crash, loads several times. Each load takes turns with
its limit (`compare.loads`): a plain copy of the same bytes for loads from memory, a plain read for
loads from storage. The time of a load ends on the last rank. It includes requests to the agent,
planning, agreement of all ranks, reading, and verification of every digest.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.compare.driver import run_job
from benchmarks.compare.job import Size
from benchmarks.compare.report import LOADS, load_share, median
from benchmarks.compare.targets import OURS
from benchmarks.study import Result, Study, Table

_MS = 1000
#: Parts that `System.watch_load` measures for ours.
PARTS = ("copied", "digested")


_COLUMNS = {
    "state of a rank": "",
    "from": "",
    "limit, ms": ".0f",
    "load, ms": ".0f",
    "first": ".0f",
    "CPU": ".0f",
    "limit / load": ".2f",
    "least": ".2f",
    "most": ".2f",
    **dict.fromkeys((*PARTS, "rest"), ".0f"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, nargs="+", default=[256, 1024], help="state of one rank")


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield, for each size and source, the times of loads and the ratio of limit to load."""
    rows = []
    for mib in options.mib:
        size = Size(mib=mib, ranks=options.ranks, loads=options.rounds)
        with tempfile.TemporaryDirectory(dir=root) as directory:
            run_job("save-once", [OURS], size, Path(directory))
            results = run_job("load", [OURS], size, Path(directory))
        figures = results["systems"][OURS]
        yield from figures["errors"]
        state = f"{results['rank_nbytes'] / 2**20:.0f} MiB"
        rows += [(state, how, *_values(figures, how)) for how in LOADS]
    yield Table(
        f"{options.ranks} ranks, same layout; medians of {options.rounds} loads; limit: "
        "a plain read or copy of the same bytes right before the load; first: the first load of "
        "its kind, ms; CPU: CPU time of one rank, ms; copied: the kernel's copies, with waits for "
        "disks, ms; digested: digests, ms; both: sum over all threads of the slowest rank; rest: "
        "the load without these two, ms",
        _COLUMNS,
        rows,
    )


def _values(figures: dict[str, Any], how: str) -> list[float | None]:
    took, limits = figures.get(f"{how}_s"), figures.get(f"{how}_limit_s")
    if not took:
        return [None] * (len(_COLUMNS) - 2)
    shares = [limit / load for limit, load in zip(limits, took, strict=True)]
    parts = [figures[f"{how}_{part}_s"] for part in PARTS]
    rest = median([whole - sum(of_load) for whole, *of_load in zip(took, *parts, strict=True)])
    times = [median(limits), median(took), took[0], median(figures[f"{how}_cpu_s"])]
    # With several threads the sum of the parts can exceed the load; then there is no rest.
    later = [*map(median, parts), rest if rest is not None and rest > 0 else None]
    return [
        *map(_ms, times),
        *(load_share(figures, how), min(shares), max(shares)),
        *map(_ms, later),
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else _MS * seconds


STUDY = Study("restart", "loads after a restart, against plain copies", add_options, run)
