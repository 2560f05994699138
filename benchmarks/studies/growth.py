"""Growth of each cost of a save and a load with the state, the number of tensors, and the ranks.

Each number of ranks has one job, which measures one size after another.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.compare.driver import run_sizes
from benchmarks.compare.job import Size
from benchmarks.compare.report import summary
from benchmarks.study import Result, Study, Table

_USUAL = Size(mib=64, pieces=296, ranks=1, saves=3, train_saves=0, loads=1, timeout_s=240)
#: Sizes that each job measures: (MiB, tensors) of a rank, by the number of ranks. One rank also has
#: larger states.
_JOBS: dict[int, list[tuple[int, int]]] = {
    1: [(64, 296), (64, 1000), (64, 5000), (64, 20_000)],
    2: [(64, 296)],
    4: [(64, 296)],
    8: [(64, 296)],
}
#: Copies of the state in memory: the state, the target of a memcpy, two slots, and cached files.
_COPIES = 5
_COLUMNS = {
    "first blocked, ms": ("first_blocked_s", 1000),
    "blocked, ms": ("blocked_s", 1000),
    "all copied, ms": ("settled_s", 1000),
    "x memcpy": ("settled_over_memcpy", 1),
    "durable, s": ("durable_s", 1),
    "CPU s per GB": ("cpu_s_per_gb", 1),
    "load cold, s": ("cold_s", 1),
    "warm, s": ("warm_s", 1),
}
_GROWING: dict[str, Callable[[Size], float]] = {
    "MiB of a rank": lambda size: size.mib,
    "tensors of a rank": lambda size: size.pieces,
    "ranks": lambda size: size.ranks,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=list(_JOBS), help="numbers of ranks, of 1, 2, 4, 8"
    )
    parser.add_argument("--most-mib", type=int, default=1024, help="largest state of a rank, MiB")


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield the figures of every job, then a table per growing quantity.

    The size of one rank's state grows by a factor of four.
    """
    measured: dict[Size, dict[str, Any]] = {}
    for number in options.ranks:
        points = list(_JOBS[number])
        if number == 1:
            larger = (4**n * int(_USUAL.mib) for n in range(1, 9))
            points += [(mib, _USUAL.pieces) for mib in larger if mib <= options.most_mib]
        sizes = []
        for mib, pieces in points:
            # Storage may be slow, so larger states get more time.
            timeout_s = _USUAL.timeout_s * max(1.0, mib * number / 1024)
            size = dataclasses.replace(
                _USUAL, mib=mib, pieces=pieces, ranks=number, timeout_s=timeout_s
            )
            needed = _COPIES * mib * number * 2**20
            if needed <= psutil.virtual_memory().available:
                sizes.append(size)
            else:
                yield f"{number} ranks, {mib} MiB each: left out, needs {needed / 2**30:.0f} GiB"
        if not sizes:
            continue
        with tempfile.TemporaryDirectory(dir=root) as directory:
            results = run_sizes("grow", ["flashckpt"], sizes, Path(directory))
        for size, figures in zip(sizes, results, strict=True):
            measured[size] = {"size": dataclasses.asdict(size), **figures}
            yield measured[size]
        yield f"jobs of {number} ranks: measured in {len(sizes)} sizes"
    for what, quantity in _GROWING.items():
        yield from _tables(what, measured, quantity)


def _tables(
    what: str, measured: dict[Size, dict[str, Any]], quantity: Callable[[Size], float]
) -> Iterator[Table]:
    """Yield a table of the points that differ in one quantity only, with exponents of growth."""
    smallest = min(measured, key=lambda size: (quantity(size), size.ranks), default=_USUAL)
    points = {
        quantity(size): _values(summary(results, "flashckpt"))
        for size, results in sorted(measured.items(), key=lambda point: quantity(point[0]))
        if all(of(size) == of(smallest) for of in _GROWING.values() if of is not quantity)
    }
    if len(points) < 2:
        return
    low, *_, high = points
    powers = [
        f"^{math.log(after / before, high / low):.2f}" if before and after else None
        for before, after in zip(points[low], points[high], strict=True)
    ]
    columns = {what: "", **dict.fromkeys(_COLUMNS, ".3g")}
    rows = [(f"{value:g}", *values) for value, values in points.items()]
    title = f"growing: {what}; last row: exponent of the growth from the least to the most"
    yield Table(title, columns, [*rows, ("grows with", *powers)])


def _values(row: dict[str, float | None]) -> list[float | None]:
    pairs = ((row[name], factor) for name, factor in _COLUMNS.values())
    return [None if value is None else value * factor for value, factor in pairs]


STUDY = Study("growth", "growth of costs with state, tensors and ranks", add_options, run)
