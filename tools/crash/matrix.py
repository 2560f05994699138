"""Runs the cells and prints a table of their results."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.support.object_server import reachable_s3_server
from tools.crash import roots, trouble
from tools.crash.cells import all_cells
from tools.crash.family import AnyCell, RestorePoint
from tools.crash.forks import forks
from tools.crash.peers import peer_cells
from tools.crash.requeues import requeues
from tools.crash.rivals import rival_cells
from tools.crash.roots import FAULTY, S3, is_hit
from tools.crash.second_jobs import second_jobs
from tools.crash.second_starts import second_starts
from tools.crash.storage_faults import faulty_cells

#: Width of the table where no terminal sets it, as in a file.
_WIDTH = 100


def _tables(cells: list[AnyCell], passed: dict[AnyCell, bool]) -> Iterator[Table]:
    """Yield tables that count cells by row and column; `passed` has the cells that ended."""
    by_table: dict[str, list[AnyCell]] = {}
    for cell in cells:
        if cell in passed:
            by_table.setdefault(cell.table, []).append(cell)
    for ended in by_table.values():
        columns = dict.fromkeys(cell.place[1] for cell in ended)
        counts: dict[tuple[tuple[str, str], str], list[bool]] = collections.defaultdict(list)
        for cell in ended:
            counts[cell.place].append(passed[cell])
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("process", "stopped at", *columns):
            table.add_column(name)
        for row in sorted({cell.place[0] for cell in ended}):
            here = [counts[row, column] for column in columns]
            table.add_row(*row, *(f"{sum(few)}/{len(few)}" if few else "" for few in here))
        yield table


def every_cell(seeds: int, storage: str) -> Iterator[AnyCell]:
    """Yield the cells that have their steps and their obstacles on this storage."""
    of_runs = (second_starts, second_jobs, requeues, forks, faulty_cells, rival_cells, peer_cells)
    for cell in (*(cell for cells in of_runs for cell in cells()), *all_cells(seeds, storage)):
        if is_hit(cell.point, storage) and (storage != S3 or cell.in_buckets):
            yield cell


def run(
    *,
    seeds: int,
    only: str,
    jobs: int,
    keep: Path | None,
    list: bool,
    storage: str,
    fault_seed: int,
) -> int:
    """Run the cells whose description contains `only`; return the exit status."""
    out = Console(soft_wrap=True, highlight=False)
    if not out.is_terminal:
        out.width = _WIDTH
    cells = [cell for cell in every_cell(seeds, storage) if only in str(cell)]
    if list:
        for cell in cells:
            out.print(str(cell), markup=False)
        return 0
    started = time.monotonic()
    passed: dict[AnyCell, bool] = {}
    restored: collections.Counter[str] = collections.Counter()
    home = Path(tempfile.mkdtemp(prefix="flashckpt-crash-"))
    seed = fault_seed if storage == FAULTY else None
    if seed is not None:
        out.print(f"storage with faults, seed {seed}")
    met: collections.Counter[str] = collections.Counter()
    missed: list[AnyCell] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=out, disable=not out.is_terminal)
    settings = {FAULTY: trouble.everywhere, S3: lambda: reachable_s3_server(home / "s3")}
    with (
        settings.get(storage, contextlib.nullcontext)(),
        bar,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        task = bar.add_task("crashing", total=len(cells))
        running = {
            pool.submit(
                _run_cell, cell, home / str(n), keep, storage, fault_seed, met, missed
            ): cell
            for n, cell in enumerate(cells)
        }
        try:
            for future in concurrent.futures.as_completed(running):
                cell = running[future]
                error = future.exception()
                passed[cell] = error is None
                if error is None:
                    restored.update(point.source for point in future.result())
                else:
                    message = str(error).partition("\n")[0]
                    out.print(f"FAILED {cell}: {message[:500]}", markup=False)
                bar.advance(task)
        except (KeyboardInterrupt, SystemExit):
            out.print("stopped before the end")
        finally:
            pool.shutdown(cancel_futures=True)
    shutil.rmtree(home)
    for table in _tables(cells, passed):
        out.print(table)
    sources = ", ".join(f"{count} from {name}" for name, count in restored.most_common())
    if seed is not None:
        calls = ", ".join(f"{count} at {call}" for call, count in met.most_common())
        out.print(f"storage with faults, seed {seed}: {met.total()} calls were refused: {calls}")
    for cell in missed:
        out.print(f"an error kept the agent from the step of {cell}", markup=False)
    out.print(
        f"{sum(passed.values())}/{len(passed)} cells of {len(cells)}; "
        f"{restored.total()} restarts: {sources}; "
        f"{time.monotonic() - started:.0f} s"
    )
    return 0 if sum(passed.values()) == len(cells) else 1


def _run_cell(
    cell: AnyCell,
    home: Path,
    keep: Path | None,
    storage: str,
    fault_seed: int,
    met: collections.Counter[str],
    missed: list[AnyCell],
) -> list[RestorePoint]:
    """Run a cell in the new directory `home`.

    Args:
        keep: directory for a copy of the files of a failed cell.
        storage: one of `STORAGES`.
        fault_seed: seed of the faults of `FAULTY`.
        met: counter of the refused calls.
        missed: cells whose agent did not come to its step, because of an error.
    """
    home.mkdir()
    if storage == FAULTY:
        trouble.prepare(home, fault_seed, cell)
    elif storage == S3:
        roots.put_in_bucket(home)
    try:
        return cell.run(home) or []
    except BaseException:
        if keep is not None:
            kept = keep / home.name
            shutil.copytree(home, kept, ignore=shutil.ignore_patterns("*.sock"))
            (kept / "error.txt").write_text(f"{cell}\n{traceback.format_exc()}")
        raise
    finally:
        met.update(trouble.failed_calls(home))
        if trouble.has_missed_step(home):
            missed.append(cell)
        shutil.rmtree(home)
