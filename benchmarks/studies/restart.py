"""Loads after a restart, in the layout that was saved: from memory, and from storage.

One job saves once; another one, as after a crash, loads again and again. Each load takes turns with
its limit (`compare.loads`): a plain copy of the same bytes for loads from memory, a plain read for
those from storage. A load counts from its call to its return on the last rank: the talk with
the agent, planning, agreement of all ranks, reading, and the check of every digest.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.compare.driver import Size, run_job
from benchmarks.compare.report import LOADS, load_share, median
from benchmarks.study import Result, Study, Table

_MS = 1000
#: What `System.watch_load` tells of ours.
PARTS = ("copied", "digested")


_COLUMNS = {
    "state of a rank": "",
    "from": "",
    "limit, ms": ".0f",
    "load, ms": ".0f",
    "first": ".0f",
    "CPU": ".0f",
    "share of it": ".2f",
    "least": ".2f",
    "most": ".2f",
    **dict.fromkeys((*PARTS, "rest"), ".0f"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, nargs="+", default=[256, 1024], help="state of one rank")
    systems = ("flashckpt", "flashckpt-small-pages")
    parser.add_argument("--system", choices=systems, default=systems[0])


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield, for each size and source, the times of loads and what part their limit takes."""
    system, rows = options.system, []
    for mib in options.mib:
        size = Size(mib=mib, ranks=options.ranks, loads=options.rounds)
        with tempfile.TemporaryDirectory(dir=root) as directory:
            run_job("save-once", [system], size, Path(directory))
            results = run_job("load", [system], size, Path(directory))
        found = results["systems"][system]
        yield from found["errors"]
        state = f"{results['rank_nbytes'] / 2**20:.0f} MiB"
        rows += [(state, how, *_values(found, how)) for how in LOADS]
    yield Table(
        f"{system}, {options.ranks} ranks, same layout; medians of {options.rounds} loads; limit: "
        "a plain read or copy of the same bytes right before; first: the first load of its kind; "
        "CPU: of one rank, ms; share: limit / load; copied: by the kernel, waiting for disks "
        "included; digested: each on its slowest rank, all its threads together, ms; rest: of the "
        "load, but for the two",
        _COLUMNS,
        rows,
    )


def _values(found: dict[str, Any], how: str) -> list[float | None]:
    took, limits = found.get(f"{how}_s"), found.get(f"{how}_limit_s")
    if not took:
        return [None] * (len(_COLUMNS) - 2)
    shares = [limit / load for limit, load in zip(limits, took, strict=True)]
    parts = [found[f"{how}_{part}_s"] for part in PARTS]
    rest = median([whole - sum(of_it) for whole, *of_it in zip(took, *parts, strict=True)])
    times = [median(limits), median(took), took[0], median(found[f"{how}_cpu_s"])]
    # Several threads work at the same time: what they took together is no part of the whole.
    later = [*map(median, parts), rest if rest is not None and rest > 0 else None]
    return [
        *map(_ms, times),
        *(load_share(found, how), min(shares), max(shares)),
        *map(_ms, later),
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else _MS * seconds


STUDY = Study("restart", "loads after a restart, against plain copies", add_options, run)
