"""A family of cells, to the matrix: each cell has a place in a table and tells a story."""

from __future__ import annotations

import abc
from pathlib import Path

from tests.agent.test_shard_writer import read_rank, stored
from tests.crash.job import CellError
from tests.crash.truth import committed
from tests.support.trainer import FakeTrainer, content

#: Lives that any cell has, at most.
_LIVES = 5


class FamilyCell(abc.ABC):
    """A cell whose story is its own."""

    @property
    @abc.abstractmethod
    def place(self) -> tuple[tuple[str, str], str]:
        """Process and step, which make the row, and what happens there: the column."""

    @abc.abstractmethod
    def tell(self, home: Path) -> None:
        """Let the cell happen in the empty directory `home`.

        Raises:
            CellError: something is not as it should be.
        """


def bytes_of(life: int, trainer: FakeTrainer, iteration: int) -> bytes:
    """Return what a rank holds at an iteration in one of its lives: no two lives are alike."""
    return content(trainer.rank + 100 * life, iteration, trainer.layout.nbytes)


def life_of(data: bytes, trainer: FakeTrainer, iteration: int) -> int:
    """Return the life whose state `data` is.

    Raises:
        CellError: it is that of no life, or of several.
    """
    for life in range(1, _LIVES + 1):
        if data == bytes_of(life, trainer, iteration):
            return life
    raise CellError(f"rank {trainer.rank}: iteration {iteration} is no life's state")


def lives_in(root: Path, trainers: list[FakeTrainer]) -> dict[int, set[int]]:
    """Return, by committed iteration, the lives whose state its ranks have."""
    return {
        iteration: {
            life_of(read_rank(stored(root, iteration), trainer), trainer, iteration)
            for trainer in trainers
        }
        for iteration in committed(root)
    }
