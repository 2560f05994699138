"""Growth of each cost of a save and a load with the state, the number of tensors, and the ranks.

Each number of ranks has one job, which measures one size after another and reports it at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.compare.driver import Size, ranks
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
_POLL_S = 0.2
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
        "--ranks", type=int, nargs="+", help="run only jobs of so many ranks, of 1, 2, 4, 8"
    )
    parser.add_argument("--most-mib", type=int, default=1024, help="largest state of a rank, MiB")


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    """Yield every point as soon as it is measured, then a table per growing quantity.

    The size of one rank's state grows by a factor of four.
    """
    only, most_mib = options.ranks, options.most_mib
    jobs = {number: list(sizes) for number, sizes in _JOBS.items() if not only or number in only}
    if 1 in jobs:
        sizes_mib = [int(4**n * _USUAL.mib) for n in range(1, 9) if 4**n * _USUAL.mib <= most_mib]
        jobs[1] += [(mib, _USUAL.pieces) for mib in sizes_mib]
    started = time.monotonic()
    measured: dict[Size, dict[str, Any]] = {}
    for number, sizes in jobs.items():
        wanted = [dataclasses.replace(_USUAL, mib=m, pieces=n, ranks=number) for m, n in sizes]
        available = psutil.virtual_memory().available
        fitting = [size for size in wanted if _needed(size) <= available]
        for size in wanted:
            if size not in fitting:
                gib = _needed(size) / 2**30
                yield (
                    f"{size.ranks} ranks, {size.mib} MiB each: left out, needs {gib:.0f} GiB of "
                    "memory"
                )
        for size, results in _points(root, fitting):
            measured[size] = results
            yield results
            row = summary(results, "flashckpt")
            costs = "; ".join(
                f"{name} {'-' if value is None else f'{value:.3g}'}"
                for name, value in zip(_COLUMNS, _values(row), strict=True)
            )
            yield (
                f"{time.monotonic() - started:.0f} s: {size.ranks} ranks, {size.mib:g} MiB in "
                f"{results['pieces']} tensors each: {costs}"
            )
    for what, quantity in _GROWING.items():
        yield from _tables(what, measured, quantity)


def _needed(size: Size) -> float:
    """Return the bytes of memory that a job needs."""
    return _COPIES * size.mib * size.ranks * 2**20


def _points(root: Path, wanted: list[Size]) -> Iterator[tuple[Size, dict[str, Any]]]:
    """Yield the figures of each size of one job as soon as they are measured."""
    if not wanted:
        return
    with tempfile.TemporaryDirectory(dir=root) as directory:
        result = Path(directory) / "grow.json"
        more = ("--sizes", json.dumps([[int(s.mib * 2**20), s.pieces] for s in wanted]))
        with ranks("grow", ["flashckpt"], wanted[0], Path(directory), result, *more) as job:
            for size in wanted:
                # Storage may be slow, so larger states get more time.
                patience_s = _USUAL.timeout_s * max(1.0, size.mib * size.ranks / 1024)
                deadline = time.monotonic() + patience_s
                line = _line(result, wanted.index(size), job, deadline)
                if line is None:
                    if job.poll() is None:
                        raise SystemExit(
                            f"{size.ranks} ranks, {size.mib} MiB in {size.pieces} tensors each: "
                            f"not measured within {patience_s:.0f} s"
                        )
                    break
                yield size, {"size": dataclasses.asdict(size), **json.loads(line)}
            job.wait(_USUAL.timeout_s)


def _line(result: Path, number: int, job: Any, deadline: float) -> str | None:
    """Return line `number` of `result` once it is complete; None if the job ended before."""
    while time.monotonic() < deadline:
        ended = job.poll() is not None
        lines = result.read_text().splitlines(keepends=True) if result.exists() else []
        if len(lines) > number and lines[number].endswith("\n"):
            return lines[number]
        if ended:
            return None
        time.sleep(_POLL_S)
    return None


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
    """Return the values of `_COLUMNS`."""
    pairs = ((row[name], factor) for name, factor in _COLUMNS.values())
    return [None if value is None else value * factor for value, factor in pairs]


STUDY = Study("growth", "growth of costs with state, tensors and ranks", add_options, run)
