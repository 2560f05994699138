"""Families of cells, in addition to the cells of one job, of peers and of rivals."""

from __future__ import annotations

from tools.crash.family import FamilyCell
from tools.crash.forks import Forks, forks
from tools.crash.requeues import Requeue, requeues
from tools.crash.second_jobs import SecondJob, second_jobs
from tools.crash.second_starts import SecondStart, second_starts
from tools.crash.storage_faults import faulty_cells, faulty_sample

#: The function that returns the cells, for each family.
FAMILIES = (
    second_starts,
    second_jobs,
    requeues,
    forks,
    faulty_cells,
)


def family_cells() -> list[FamilyCell]:
    """Return all cells of all families."""
    return [cell for cells in FAMILIES for cell in cells()]


def family_sample() -> list[FamilyCell]:
    """Return the cells of each family that the test suite runs."""
    return [
        SecondStart("persist.chunk", 2),
        SecondJob(0, "stage.half", 3, "storage"),
        Requeue(1, "persist.record", 2, "moved"),
        Forks(0, "stage.half", 2),
        *faulty_sample(),
    ]
