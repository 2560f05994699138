"""Whose side state a rank takes when the number of replicas has changed."""

from __future__ import annotations

import pytest

from megatron_flashckpt.layout.manifest import Coordinates
from megatron_flashckpt.saved_job import SavedJob

#: TP1 PP2 DP2 EP2: expert ranks lie along the replicas.
SAVED = [
    Coordinates(pp=0, dp=0, ep=0),
    Coordinates(pp=0, dp=1, ep=1),
    Coordinates(pp=1, dp=0, ep=0),
    Coordinates(pp=1, dp=1, ep=1),
]


@pytest.mark.parametrize(
    ("mine", "twin"),
    [
        (Coordinates(pp=1, dp=1, ep=1), 3),
        (Coordinates(pp=1, dp=2, ep=0, edp=1), 2),
        (Coordinates(pp=0, dp=3, ep=1, edp=1), 1),
        (Coordinates(pp=1, dp=2, ep=2), 2),
        (Coordinates(tp=1, pp=0), None),
    ],
)
def test_the_side_state_comes_from_the_same_place_or_the_first_with_the_same_part(
    mine: Coordinates, twin: int | None
) -> None:
    assert SavedJob("the checkpoint", [], SAVED).twin(mine, (1, 2, 2)) == twin
