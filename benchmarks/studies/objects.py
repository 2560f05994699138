"""Saves to an S3 server on this machine and loads from it: processor time, memory and speed.

Every measurement is a process of its own; ways take turns. The server (SeaweedFS) shares processors
and disk, so seconds say little: what counts is processor time of the client, which the server's is
not part of, and the speed relative to obstore alone in the same round.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.object_clients import WAYS
from benchmarks.resources import Peak, cpu_s, own_mib
from benchmarks.study import Result, Study, Table, in_turns
from tests.support.object_server import BUCKET, reachable_s3_server

_ALONE = "obstore alone"


class Figures(NamedTuple):
    seconds: float
    cpu_s: float
    """Processor time of the process that sends or receives."""
    mib: float
    """Peak of its private memory beyond that before the call."""
    nbytes: int


def measured(pid: int, nbytes: int, work: Callable[[], None]) -> Figures:
    """Call `work`; return what it cost the process `pid`."""
    used, since = cpu_s(pid), time.perf_counter()
    with Peak(lambda: own_mib(pid), 0.005) as peak:
        work()
        seconds = time.perf_counter() - since
    return Figures(seconds, cpu_s(pid) - used, peak.growth, nbytes)


def _measure(name: str, url: str, mib: int, where: Path, results: mp.Queue[list[Figures]]) -> None:
    """In a process of its own: put the figures of a save and of a load; the first pair is left."""
    where.mkdir()
    way = WAYS[name][0](url, mib, where)
    way.save(1)
    way.load(1)
    saved = measured(way.writer(), way.nbytes, lambda: way.save(2))
    loaded = measured(os.getpid(), way.nbytes, lambda: way.load(2))
    way.close()
    results.put([saved, loaded])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="state, MiB")


def run(options: argparse.Namespace, root: Path) -> Iterator[Result]:
    ways = [name for name, (_, package) in WAYS.items() if importlib.util.find_spec(package)]
    for name in WAYS.keys() - ways:
        yield f"{name}: left out, not installed (benchmarks/object_clients.txt)"
    context = mp.get_context("spawn")
    places = map(str, itertools.count())

    def measure(name: str) -> list[Figures]:
        results, place = context.Queue(), next(places)
        arguments = (name, f"s3://{BUCKET}/{place}/save", options.mib, root / place, results)
        process = context.Process(target=_measure, args=arguments)
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{name}: failed, see above")
        return results.get()

    with reachable_s3_server(root / "server"):
        works = {name: functools.partial(measure, name) for name in ways}
        taken = in_turns(works, options.rounds)
    for index, what in enumerate(("save", "load")):
        of_kind = {name: [pair[index] for pair in rounds] for name, rounds in taken.items()}
        yield _table(what, of_kind, options)


def _table(what: str, taken: dict[str, list[Figures]], options: argparse.Namespace) -> Table:
    alone = [figures.seconds for figures in taken[_ALONE]]
    rows = []
    for name, rounds in taken.items():
        shares = [one / figures.seconds for one, figures in zip(alone, rounds, strict=True)]
        rows.append(
            (
                name,
                statistics.median(figures.cpu_s / figures.nbytes * 1e9 for figures in rounds),
                statistics.median(figures.mib for figures in rounds),
                statistics.median(shares),
                *(min(shares), max(shares)),
            )
        )
    columns = {what: "", "CPU s per GB": ".2f", "memory beside the state, MiB": ".0f"}
    columns |= dict.fromkeys(("share of obstore's speed", "least", "most"), ".2f")
    title = f"{what} of {options.mib} MiB; medians of {options.rounds} interleaved rounds"
    return Table(title, columns, rows)


STUDY = Study(
    "objects", "saves to and loads from an object store, against other clients", add_options, run
)
