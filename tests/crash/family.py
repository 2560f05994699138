"""Base class of cells with a scenario of their own, and the contents that their ranks save."""

from __future__ import annotations

import abc
from pathlib import Path

from tests.agent.test_shard_writer import read_rank, stored
from tests.crash.job import CellError
from tests.crash.truth import committed
from tests.support.trainer import FakeTrainer, content

#: Largest number of runs in a cell. A run lasts from one start of a rank to the next.
_LIVES = 5


class FamilyCell(abc.ABC):
    """A cell that runs its own scenario."""

    @property
    @abc.abstractmethod
    def place(self) -> tuple[tuple[str, str], str]:
        """The row of the table (process, step), and the column (what happens there)."""

    @abc.abstractmethod
    def tell(self, home: Path) -> None:
        """Run the cell in the empty directory `home`.

        Raises:
            CellError: a check failed.
        """


def bytes_of(life: int, trainer: FakeTrainer, iteration: int) -> bytes:
    """Return the state of a rank at an iteration; it differs between runs (`life`)."""
    return content(trainer.rank + 100 * life, iteration, trainer.layout.nbytes)


def life_of(data: bytes, trainer: FakeTrainer, iteration: int) -> int:
    """Return the run whose state `data` is.

    Raises:
        CellError: no run has this state.
    """
    for life in range(1, _LIVES + 1):
        if data == bytes_of(life, trainer, iteration):
            return life
    raise CellError(f"rank {trainer.rank}: iteration {iteration} is the state of no run")


def lives_in(root: Path, trainers: list[FakeTrainer]) -> dict[int, set[int]]:
    """Return, by committed iteration, the runs whose state its ranks have."""
    return {
        iteration: {
            life_of(read_rank(stored(root, iteration), trainer), trainer, iteration)
            for trainer in trainers
        }
        for iteration in committed(root)
    }
