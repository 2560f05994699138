"""The plan of a load: what it fills, and what it copies from filled tensors."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer

from megatron_flashckpt.config import Replicated
from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.layout.piece import MASTER, WEIGHT
from megatron_flashckpt.load.load_policy import LoadPolicy
from megatron_flashckpt.load.load_request import LoadRequest, Names, StateTypes
from megatron_flashckpt.load.plan import plan_load
from megatron_flashckpt.load.saved_job import SavedJob
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.torch_dtypes import dtype_name
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


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "coordinates", Coordinates)
    monkeypatch.setattr(parallel, "model_sizes", lambda: (1, 1, 1))


def test_a_missing_master_is_made_from_the_part_of_the_weight_that_covers_it(
    one_rank: None,
) -> None:
    """A weight whose parts interleave in memory has several pieces in one box."""
    weights = [LocalPiece(run(BOX, low, low + 4), torch.arange(low, low + 4.0)) for low in (0, 4)]
    masters = [
        LocalPiece(run(MASTER_BOX, low, high), torch.full((high - low,), -1.0))
        for low, high in ((1, 4), (4, 7))
    ]
    job = SavedJob("the checkpoint", [source(0, [BOX])], [Coordinates()])
    model_state = ModelState(Replicated())
    wanted = (*weights, *masters)
    request = _Request(
        model_state, chunks=[], optimizer=None, policy=LoadPolicy(strict=False), wanted=wanted
    )
    plan_load(request, job, [], {}).finish()
    assert [master.tensor.tolist() for master in masters] == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
    ids=["to fp32", "to bf16", "to fp16"],
)
def test_weights_of_another_type_are_converted_if_no_optimizer_is_loaded(
    one_rank: None, caplog: pytest.LogCaptureFixture, stored: torch.dtype, own: torch.dtype
) -> None:
    """The layers of a key may differ in type."""
    content = torch.tensor([1.0, -0.1, 3.14159, 1 + 2**-8, 0, 7, 8, 9]).to(stored)
    layers = [
        whole("w", WEIGHT, dtype_name(dtype), (2, 8), (n, 0), (1, 8))
        for n, dtype in enumerate((stored, own))
    ]
    job = SavedJob("the checkpoint", [source(0, layers)], [Coordinates()])
    wanted = tuple(
        LocalPiece(msgspec.structs.replace(layer, dtype=dtype_name(own)), torch.empty(8, dtype=own))
        for layer in layers
    )
    state = ModelState(Replicated())
    optimizer = ChainedOptimizer([])
    request = _Request(state, chunks=[], optimizer=optimizer, policy=LoadPolicy(), wanted=wanted)
    with pytest.raises(MissingStateError, match="in the model"):
        plan_load(request, job, [], {})
    plan = plan_load(dataclasses.replace(request, optimizer=None), job, [], {})
    for read in plan.reads.reads[0]:
        of_layer = content.to(own) if read.wanted else content
        part = read, 0, memoryview(of_layer.view(torch.uint8).numpy())
        assert plan.targets.place(read, 0, read.nbytes) is None or read.wanted
        plan.targets.put([part])
    assert all(torch.equal(local.tensor, content.to(own)) for local in wanted)
    assert f"weights of type {dtype_name(stored)} become {dtype_name(own)}" in caplog.text
