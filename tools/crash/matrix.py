"""Runs the cells and prints a table of their results."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import shutil
import tempfile
import time
import traceback
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.support.object_server import reachable_s3_server
from tools.crash import roots, trouble
from tools.crash.cells import all_cells
from tools.crash.families import family_cells
from tools.crash.family import FamilyCell
from tools.crash.peers import LOST, PeerCell, peer_cells, run_peer_cell
from tools.crash.requeues import Requeue
from tools.crash.rivals import HUNG, RivalCell, rival_cells, run_rival_cell
from tools.crash.roots import FAULTY, S3, is_hit
from tools.crash.second_jobs import SecondJob
from tools.crash.story import KILLED, Cell, RestorePoint, run_cell

AnyCell = Cell | PeerCell | RivalCell | FamilyCell
_RANDOM = "random"
#: Width of the table where no terminal sets it, as in a file.
_WIDTH = 100


class Matrix:
    """Table that counts cells by row and column."""

    def __init__(self, *columns: str) -> None:
        """Args: `columns`: names of the columns after process and point."""
        self._columns = columns
        self._done: dict[tuple[str, str], dict[str, list[bool]]] = {}
        self.restored: collections.Counter[str] = collections.Counter()

    def __bool__(self) -> bool:
        return bool(self._done)

    def counts(self) -> tuple[int, int]:
        """Return the number of cells that passed, and the number that ended."""
        ended = [cell for row in self._done.values() for cells in row.values() for cell in cells]
        return sum(ended), len(ended)

    def note(self, cell: AnyCell, outcome: list[RestorePoint] | BaseException) -> None:
        failed = isinstance(outcome, BaseException)
        if not isinstance(outcome, BaseException):
            self.restored.update(restored.source for restored in outcome)
        row, column = _place(cell)
        self._done.setdefault(row, {}).setdefault(column, []).append(not failed)

    def print(self, out: Console) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("process", "stopped at", *self._columns):
            table.add_column(name)
        for row in sorted(self._done):
            cells = [self._done[row].get(column, []) for column in self._columns]
            table.add_row(
                *row,
                *(
                    f"{sum(cells_here)}/{len(cells_here)}" if cells_here else ""
                    for cells_here in cells
                ),
            )
        out.print(table)


def _place(cell: AnyCell) -> tuple[tuple[str, str], str]:
    if isinstance(cell, FamilyCell):
        return cell.place
    if isinstance(cell, PeerCell):
        return (f"agent, {cell.scheme}", cell.point), f"{cell.lost} lost"
    if isinstance(cell, RivalCell):
        return ("agent, two jobs", cell.point), HUNG
    if cell.hurried:
        return ("any", f"{len(cell.crashes)} crashes, one after the other"), _RANDOM
    last = cell.crashes[-1]
    where = last.point
    if last.point.startswith("load."):
        where += ", from memory" if cell.crashes[0].killed == "trainers" else ", from storage"
    elif cell.broken >= 0:
        where += ", of a save that failed"
    return (last.who, where), f"{last.killed} killed"


def _is_possible(cell: AnyCell, storage: str) -> bool:
    """Return whether a cell has its steps and its obstacles on this storage."""
    point = getattr(cell, "point", None)  # else `all_cells` has looked
    if point is not None and not is_hit(point, storage):
        return False
    if storage != S3:
        return True
    return isinstance(cell, Cell | Requeue | SecondJob) or (
        isinstance(cell, RivalCell) and not cell.fails
    )


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
    families = family_cells()
    every: list[AnyCell] = [*families, *rival_cells(), *peer_cells(), *all_cells(seeds, storage)]
    cells = [cell for cell in every if only in str(cell) and _is_possible(cell, storage)]
    if list:
        for cell in cells:
            out.print(str(cell), markup=False)
        return 0
    started = time.monotonic()
    matrix = Matrix(*(f"{killed} killed" for killed in KILLED), _RANDOM)
    of_peers = Matrix(*(f"{lost} lost" for lost in LOST))
    of_rivals = Matrix(HUNG)
    of_families = Matrix(*dict.fromkeys(cell.place[1] for cell in families))
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
                table = {PeerCell: of_peers, RivalCell: of_rivals}.get(type(cell), matrix)
                table = of_families if isinstance(cell, FamilyCell) else table
                table.note(cell, future.exception() or future.result())
                if future.exception():
                    message = str(future.exception()).partition("\n")[0]
                    out.print(f"FAILED {cell}: {message[:500]}", markup=False)
                bar.advance(task)
        except (KeyboardInterrupt, SystemExit):
            out.print("stopped before the end")
        finally:
            pool.shutdown(cancel_futures=True)
    shutil.rmtree(home)
    matrices = (matrix, of_peers, of_rivals, of_families)
    passed, ended = map(sum, zip(*(table.counts() for table in matrices), strict=True))
    restored = matrix.restored + of_peers.restored
    for table in matrices:
        if table:
            table.print(out)
    sources = ", ".join(f"{count} from {name}" for name, count in restored.most_common())
    if seed is not None:
        calls = ", ".join(f"{count} at {call}" for call, count in met.most_common())
        out.print(f"storage with faults, seed {seed}: {met.total()} calls were refused: {calls}")
    for cell in missed:
        out.print(f"an error kept the agent from the step of {cell}", markup=False)
    out.print(
        f"{passed}/{ended} cells of {len(cells)}; {restored.total()} restarts: {sources}; "
        f"{time.monotonic() - started:.0f} s"
    )
    return 0 if passed == len(cells) else 1


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
        if isinstance(cell, FamilyCell):
            cell.run(home)
            return []
        if isinstance(cell, RivalCell):
            run_rival_cell(cell, home)
            return []
        return run_peer_cell(cell, home) if isinstance(cell, PeerCell) else run_cell(cell, home)
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
