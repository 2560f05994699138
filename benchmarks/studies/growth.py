"""How each cost of a save and a load grows with the state, the number of tensors, and the ranks.

One job for each number of ranks, which measures one size after another and tells each at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.compare.driver import Size, ranks
from benchmarks.compare.report import summary

_USUAL = Size(mib=64, pieces=296, ranks=1, saves=3, train_saves=0, loads=1, timeout_s=240)
#: What each job measures: the number of ranks, and (MiB, tensors) of each.
_JOBS: dict[int, list[tuple[int, int]]] = {
    1: [(64, 296), (256, 296), (1024, 296), (64, 1000), (64, 5000), (64, 20_000)],
    2: [(64, 296)],
    4: [(64, 296)],
    8: [(64, 296)],
}
#: The state, what a memcpy takes it to, two slots, and the pages of the file.
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
_GROWING = {
    "MiB of a rank": lambda size: size.mib,
    "tensors of a rank": lambda size: size.pieces,
    "ranks": lambda size: size.ranks,
}


def bench_growth(
    out: Console, where: Path | None, only: list[int] | None, most_mib: int, json_path: Path | None
) -> None:
    """Print every point when it is there, then a table per quantity that grows.

    Args:
        only: numbers of ranks to measure; None: all.
        most_mib: the largest state of a rank, four times the one before.
    """
    jobs = {number: list(sizes) for number, sizes in _JOBS.items() if not only or number in only}
    if 1 in jobs:
        mib = [int(4**n * _USUAL.mib) for n in range(1, 9) if 4**n * _USUAL.mib <= most_mib]
        others = [size for size in jobs[1] if size[0] == _USUAL.mib]
        jobs[1] = [*others, *((each, _USUAL.pieces) for each in mib)]
    started = time.monotonic()
    measured: dict[Size, dict[str, Any]] = {}
    for number, sizes in jobs.items():
        for size, results in _points(out, where, number, sizes):
            measured[size] = results
            row = summary(results, "flashckpt")
            said = "; ".join(f"{name} {_cell(row, *of)}" for name, of in _COLUMNS.items())
            out.print(
                f"{time.monotonic() - started:.0f} s: {size.ranks} ranks, {size.mib:g} MiB in "
                f"{results['pieces']} tensors each: {said}"
            )
    for what, quantity in _GROWING.items():
        _print(out, what, measured, quantity)
    if json_path is not None:
        json_path.write_text(json.dumps(list(measured.values()), indent=1) + "\n")


def _points(
    out: Console, where: Path | None, number: int, sizes: list[tuple[int, int]]
) -> Iterator[tuple[Size, dict[str, Any]]]:
    """Yield the figures of each size as soon as they are there."""
    wanted = []
    for mib, pieces in sizes:
        size = dataclasses.replace(_USUAL, mib=mib, pieces=pieces, ranks=number)
        needed = _COPIES * mib * number * 2**20
        if needed > psutil.virtual_memory().available:
            out.print(f"{number} ranks, {mib} MiB each: needs {needed / 2**30:.0f} GiB of memory")
        else:
            wanted.append(size)
    if not wanted:
        return
    with tempfile.TemporaryDirectory(dir=where, prefix="fc") as root:
        result = Path(root) / "grow.json"
        more = ("--sizes", json.dumps([[int(s.mib * 2**20), s.pieces] for s in wanted]))
        with ranks("grow", ["flashckpt"], wanted[0], Path(root), result, *more) as job:
            for size in wanted:
                # Storage may be slow: of each GiB.
                patience_s = _USUAL.timeout_s * max(1.0, size.mib * number / 1024)
                deadline = time.monotonic() + patience_s
                line = _line(result, wanted.index(size), job, deadline)
                if line is None:
                    if job.poll() is None:
                        raise SystemExit(
                            f"{number} ranks, {size.mib} MiB in {size.pieces} tensors each: not "
                            f"measured within {patience_s:.0f} s"
                        )
                    break
                yield size, {"size": dataclasses.asdict(size), **json.loads(line)}
            job.wait(_USUAL.timeout_s)


def _line(result: Path, number: int, job: Any, deadline: float) -> str | None:
    """Return a line of `result` when it is whole; None if it never will be."""
    while time.monotonic() < deadline:
        ended = job.poll() is not None
        lines = result.read_text().splitlines(keepends=True) if result.exists() else []
        if len(lines) > number and lines[number].endswith("\n"):
            return lines[number]
        if ended:
            return None
        time.sleep(_POLL_S)
    return None


def _print(out: Console, what: str, measured: dict[Size, dict[str, Any]], quantity: Any) -> None:
    """Print the points in which only one quantity differs, and what power of it costs follow."""
    smallest = min(measured, key=lambda size: (quantity(size), size.ranks), default=_USUAL)
    points = {
        quantity(size): summary(results, "flashckpt")
        for size, results in sorted(measured.items(), key=lambda point: quantity(point[0]))
        if all(of(size) == of(smallest) for of in _GROWING.values() if of is not quantity)
    }
    if len(points) < 2:
        return
    table = Table(what, *_COLUMNS, title=f"growing: {what}", title_justify="left", box=None)
    for value, row in points.items():
        table.add_row(f"{value:g}", *(_cell(row, *of) for of in _COLUMNS.values()))
    low, *_, high = points
    powers = []
    for name, _ in _COLUMNS.values():
        before, after = points[low][name], points[high][name]
        known = before and after
        powers.append(f"^{math.log(after / before, high / low):.2f}" if known else "-")
    table.add_row("grows with", *powers)
    out.print(table)


def _cell(row: dict[str, float | None], name: str, factor: float) -> str:
    value = row[name]
    return "-" if value is None else f"{value * factor:.3g}"
