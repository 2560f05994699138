"""Base class of cells, and the contents that ranks without Megatron save."""

from __future__ import annotations

import abc
import dataclasses
from pathlib import Path

from tests.support.stored import read_rank, stored
from tests.support.trainer import FakeTrainer, content
from tools.crash.job import CellError
from tools.crash.truth import committed

#: Largest number of runs in a cell. A run lasts from one start of a rank to the next.
_MAX_RUNS = 5


@dataclasses.dataclass(frozen=True)
class RestorePoint:
    """The checkpoint that a start restores or must restore; initially none."""

    iteration: int = 0
    source: str = "nothing"


class AnyCell(abc.ABC):
    """A cell of any kind."""

    point: str
    """Failpoint at which a process is stopped, the last one of several."""
    table = "runs of a job"
    """The table that counts the cell."""

    in_buckets = False
    """True if the cell also runs in a bucket."""

    @property
    @abc.abstractmethod
    def place(self) -> tuple[tuple[str, str], str]:
        """The row of the table (process, step), and the column (what happens there)."""

    @abc.abstractmethod
    def run(self, home: Path) -> list[RestorePoint] | None:
        """Run the cell in the empty directory `home`; return restored checkpoints to count.

        Raises:
            CellError: a check failed.
        """


def bytes_of(run: int, trainer: FakeTrainer, iteration: int) -> bytes:
    """Return the state of a rank at an iteration; it differs between runs (`run`)."""
    return content(trainer.rank + 100 * run, iteration, trainer.layout.nbytes)


def run_of(data: bytes, trainer: FakeTrainer, iteration: int) -> int:
    """Return the run whose state `data` is.

    Raises:
        CellError: no run has this state.
    """
    for run in range(1, _MAX_RUNS + 1):
        if data == bytes_of(run, trainer, iteration):
            return run
    raise CellError(f"rank {trainer.rank}: iteration {iteration} is the state of no run")


def check_runs(root: Path | str, trainers: list[FakeTrainer], first: int, second: int) -> None:
    """Fail unless committed iterations are of run 1 up to `first`, of run 2 up to `second`."""
    for iteration in committed(root):
        checkpoint = stored(root, iteration)
        runs = {run_of(read_rank(checkpoint, of), of, iteration) for of in trainers}
        expected = 1 if iteration <= first else 2 if iteration <= second else 3
        if runs != {expected}:
            raise CellError(f"iteration {iteration} has the state of runs {runs}, not {expected}")
