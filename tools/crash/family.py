"""Base class of cells with a scenario of their own, and the contents that their ranks save."""

from __future__ import annotations

import abc
from pathlib import Path

from tests.support.stored import read_rank, stored
from tests.support.trainer import FakeTrainer, content
from tools.crash.job import CellError
from tools.crash.truth import committed

#: Largest number of runs in a cell. A run lasts from one start of a rank to the next.
_MAX_RUNS = 5


class FamilyCell(abc.ABC):
    """A cell that runs its own scenario."""

    @property
    @abc.abstractmethod
    def place(self) -> tuple[tuple[str, str], str]:
        """The row of the table (process, step), and the column (what happens there)."""

    @abc.abstractmethod
    def run(self, home: Path) -> None:
        """Run the cell in the empty directory `home`.

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


def runs_in(root: Path | str, trainers: list[FakeTrainer]) -> dict[int, set[int]]:
    """Return, by committed iteration, the runs whose state its ranks have."""
    return {
        iteration: {
            run_of(read_rank(stored(root, iteration), trainer), trainer, iteration)
            for trainer in trainers
        }
        for iteration in committed(root)
    }
