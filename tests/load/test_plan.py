"""The plan of a load: what it fills, and what it copies from filled tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_flashckpt.config import Replicated
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.piece import MASTER, WEIGHT
from megatron_flashckpt.load.plan import plan_load
from megatron_flashckpt.load.request import LoadRequest, Names, StateTypes
from megatron_flashckpt.load.source_job import SavedJob
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.model_state import ModelState
from tests.support.worlds import run, source, whole

BOX = whole("w", WEIGHT, "F32", (8,), (0,), (8,))
MASTER_BOX = whole("w", MASTER, "F32", (8,), (0,), (8,))


@dataclasses.dataclass(frozen=True)
class _Request(LoadRequest):
    """A load into given pieces, without a model."""

    wanted: tuple[LocalPiece, ...] = ()

    def pieces(self, job: SavedJob, state_types: StateTypes) -> list[LocalPiece]:
        return [*self.wanted]

    def requantized(self) -> Names:
        return set()


def test_a_missing_master_is_made_from_the_part_of_the_weight_that_covers_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight whose parts interleave in memory has several pieces in one box."""
    monkeypatch.setattr(parallel, "coordinates", Coordinates)
    monkeypatch.setattr(parallel, "model_sizes", lambda: (1, 1, 1))
    weights = [LocalPiece(run(BOX, low, low + 4), torch.arange(low, low + 4.0)) for low in (0, 4)]
    masters = [
        LocalPiece(run(MASTER_BOX, low, high), torch.full((high - low,), -1.0))
        for low, high in ((1, 4), (4, 7))
    ]
    job = SavedJob("the checkpoint", [source(0, [BOX])], [Coordinates()])
    model_state = ModelState(Replicated())
    wanted = (*weights, *masters)
    request = _Request(model_state, chunks=[], optimizer=None, strict=False, wanted=wanted)
    plan_load(request, job, [], {}).finish()
    assert [master.tensor.tolist() for master in masters] == [[1, 2, 3], [4, 5, 6]]
