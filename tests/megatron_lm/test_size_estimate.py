"""Estimates of a save before the first step, compared with the save after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_flashckpt.config import Replicated
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.megatron_lm import optimizer_state, parallel
from megatron_flashckpt.megatron_lm.accounting import has_states
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.optimizer_state import OptimizerEntry
from megatron_flashckpt.megatron_lm.size_estimate import _tensors_after_step, expect
from tests.cpu_megatron.stubs.emerging_optimizers.emerging_optimizers.scalar_optimizers import Lion
from tests.megatron_lm.test_model_state import Job
from tests.support.jobs.stand_ins import FusedAdam

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def stateless(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def lion(parameters: Any) -> torch.optim.Optimizer:
    return Lion(parameters, lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)


@pytest.mark.parametrize("make", [adam, momentum, stateless, lion])
@pytest.mark.parametrize("policy", ["share", "first", 2])
def test_the_estimate_equals_the_save_of_each_replica(
    make: Make, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, count = Job(), 3
    monkeypatch.setattr(parallel, "replica_ranks", lambda *, expert: [0, 1, 2])
    job.optimizer.optimizer = make(job.masters)
    states = [ModelState(Replicated(optimizer=policy)) for _ in range(count)]

    def of_each(list_pieces: Callable[[ModelState], list[Piece]]) -> list[list[Piece]]:
        every = []
        for index, state in enumerate(states):
            monkeypatch.setattr(parallel, "data_parallel", lambda index=index: (count, index))
            every.append(list_pieces(state))
        return every

    def saved(state: ModelState) -> list[Piece]:
        owned = state.owned(state.geometry([job]), [job], job.optimizer)
        return owned.pieces

    before = of_each(saved)
    expected = of_each(lambda state: expect(state, [job], job.optimizer).pieces)
    assert not job.optimizer.optimizer.state, "the estimate created optimizer state"
    # Until an optimizer is complete, every step is followed by a dry run of a save.
    assert has_states(job.optimizer) == (make is stateless)
    for master in job.masters:
        master.grad = torch.randn_like(master)
    job.optimizer.optimizer.step()
    assert has_states(job.optimizer)
    after = of_each(saved)
    assert expected == after
    assert (before == after) == (make is stateless)
    assert expected == of_each(lambda state: expect(state, [job], job.optimizer).pieces)


@pytest.mark.parametrize("has_stepped", [False, True])
def test_one_entry_tells_whether_an_optimizer_has_stepped(
    has_stepped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss scaler may skip many first steps, and the question is asked after each of them."""
    job, visited = Job(), []
    if not has_stepped:
        job.optimizer.optimizer = adam(job.masters)
    list_entries = optimizer_state.entries

    def entries(optimizer: Any) -> Iterator[OptimizerEntry]:
        for entry in list_entries(optimizer):
            visited.append(entry)
            yield entry

    monkeypatch.setattr(optimizer_state, "entries", entries)
    assert has_states(job.optimizer) == has_stepped
    assert len(job.masters) > len(visited) == 1


@pytest.mark.parametrize(
    "settings",
    [{}, {"exp_avg_dtype": torch.bfloat16}, {"store_param_remainders": True}],
    ids=["fp32", "bf16-moment", "remainders"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_estimates_of_precision_aware_optimizers_include_masters(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    weight = torch.nn.Parameter(torch.randn(6).to(dtype))
    inner = FusedAdam([weight], master_weights=True, **settings)
    entry = OptimizerEntry(weight, 0, 6, weight, False, inner, True, True, keeps_master=True)
    expected = _tensors_after_step(entry)
    assert not inner.state, "the estimate created optimizer state"
    assert all(tensor.is_meta for tensor in expected.values())
    weight.grad = torch.randn_like(weight)
    inner.step()
    assert described(expected) == described(entry.tensors())
    assert described(_tensors_after_step(entry)) == described(entry.tensors())


def described(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.dtype, int]]:
    return [(kind, tensor.dtype, tensor.numel()) for kind, tensor in tensors.items()]
