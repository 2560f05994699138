"""Study: a question about this package, the options of its run, and the tables that answer it.

`benchmarks.__main__` prints each table as soon as it is measured, and writes and draws all tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import rich.table
from rich.console import Console

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Table:
    """Measured values by row. The first values of a row are texts that identify it."""

    title: str
    columns: dict[str, str]
    """Format of the values, as in an f-string, by the name of their column."""
    rows: list[tuple[Any, ...]]
    """Numbers, texts, and None where there is no value."""

    def cells(self) -> Iterator[list[str]]:
        for row in self.rows:
            pairs = zip(row, self.columns.values(), strict=True)
            yield [_cell(value, spec) for value, spec in pairs]


def _cell(value: Any, spec: str) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:{spec}}"


#: A line to print, a table, or figures that are only written to the JSON file.
Result = str | Table | dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Study:
    """One subcommand of `python -m benchmarks`."""

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], object]
    """Adds the study's own options to its parser."""
    run: Callable[[argparse.Namespace, Path], Iterator[Result]]
    """Measures with these options in an empty directory; yields results one by one."""
    draw: Callable[[list[Result], Path], None] | None = None
    """Draws the chart; None: a bar for each row of each table."""

    def add_to(self, commands: Any) -> None:
        parser = commands.add_parser(self.name, help=self.help)
        self.add_options(parser)
        parser.add_argument(
            "--dir", type=Path, help="directory to write in (default: a temporary one)"
        )
        parser.add_argument("--json", type=Path, help="file for all figures")
        parser.add_argument("--png", type=Path, help="file for a chart (needs matplotlib)")
        parser.set_defaults(command=self.carry_out)

    def carry_out(self, out: Console, options: argparse.Namespace) -> None:
        """Run the study; print, write and draw its results, even if it ends early."""
        results: list[Result] = []
        try:
            # Short: the path of an agent's socket has at most 107 bytes.
            with tempfile.TemporaryDirectory(dir=options.dir, prefix="fc") as directory:
                for result in self.run(options, Path(directory)):
                    results.append(result)
                    _show(out, result)
        finally:
            if options.json:
                encoded = json.dumps(results, indent=1, default=dataclasses.asdict)
                options.json.write_text(encoded + "\n")
            if options.png:
                try:
                    from benchmarks.chart import draw_tables

                    (self.draw or draw_tables)(results, options.png)
                except ImportError as error:
                    out.print(f"no chart: {error}; pip install matplotlib")


def turned(values: Sequence[T], number: int) -> list[T]:
    """Return the values of round `number`, so that each round begins with another one."""
    first = number % len(values)
    return [*values[first:], *values[:first]]


def in_turns(
    works: Mapping[K, Callable[[], T]], rounds: int, *, warm_up: int = 0
) -> dict[K, list[T]]:
    """Call every function once in each round; return the results of each function.

    Args:
        warm_up: number of first rounds whose results are left out.
    """
    results: dict[K, list[T]] = {key: [] for key in works}
    for number in range(-warm_up, rounds):
        for key in turned(list(works), number):
            result = works[key]()
            if number >= 0:
                results[key].append(result)
    return results


def _show(out: Console, result: Result) -> None:
    if isinstance(result, str):
        out.print(result, markup=False)
    elif isinstance(result, Table):
        out.print(result.title)
        # The first column does not wrap.
        columns = [
            rich.table.Column(name, no_wrap=not at) for at, name in enumerate(result.columns)
        ]
        printed = rich.table.Table(*columns, box=None)
        for cells in result.cells():
            printed.add_row(*cells)
        out.print(printed)
