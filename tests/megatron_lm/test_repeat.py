"""Repeated enumerations return the current tensors, and skip checks of unchanged ones."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

from megatron_flashckpt.config import Replicated
from megatron_flashckpt.layout.copies import CopyPlace
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.enumeration import Section
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.optimizer_state import OptimizerEntry
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry, Run
from tests.support.enumerations import local_pieces

#: Elements of each parameter that this rank owns: a range across both halves of a fused tensor, a
#: whole parameter, and ranges of a parameter that another rank writes and of a copy of a fourth.
OWNED = {"fused": (3, 20), "vector": (0, 5), "norm": (1, 3), "bias": (1, 4)}


class Job(torch.nn.Module):
    """A part of a model, with Megatron's distributed optimizer for 16-bit weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.randn(4, 6).bfloat16())
        self.vector = torch.nn.Parameter(torch.randn(5).bfloat16())
        self.norm = torch.nn.Parameter(torch.randn(4).bfloat16())
        self.bias = torch.nn.Parameter(torch.randn(4).bfloat16())
        self.optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
        self.fill_tables()

    def fill_tables(self) -> None:
        """Give the optimizer the ranges `OWNED` of the current parameters."""
        parameters = [getattr(self, name) for name in OWNED]
        ranges = {
            parameter: {"param": Range(*OWNED[name])} for name, parameter in self.named_parameters()
        }
        self.masters = [
            parameter.detach().view(-1)[slice(*extent)].float()
            for parameter, extent in zip(parameters, OWNED.values(), strict=True)
        ]
        optimizer = self.optimizer
        optimizer.is_stub_optimizer = False
        optimizer.config = SimpleNamespace(use_precision_aware_optimizer=False)
        optimizer.ddp_config = None
        optimizer.buffers = [SimpleNamespace(param_index_map=dict.fromkeys(parameters))]
        optimizer.model_float16_groups = [parameters]
        optimizer.shard_fp32_from_float16_groups = [self.masters]
        optimizer.model_fp32_groups, optimizer.shard_fp32_groups = [[]], [[]]
        optimizer.model_param_gbuf_map = dict.fromkeys(parameters, (0, torch.bfloat16, 0))
        optimizer.gbuf_ranges = [{torch.bfloat16: [{"param_map": ranges}]}]
        optimizer.optimizer = torch.optim.Adam(self.masters)
        for master in self.masters:
            state = {"step": torch.tensor(1.0)}
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = torch.randn_like(master)
            optimizer.optimizer.state[master] = state

    def sharded_state_dict(self) -> dict[str, ShardedTensor]:
        named = self.named_parameters()
        return {name: ShardedTensor.from_rank_offsets(name, parameter) for name, parameter in named}

    def states(self, number: int) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.optimizer.optimizer.state[self.masters[number]]
        return state


@pytest.fixture(autouse=True)
def single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "data_parallel", lambda: (1, 0))


def geometry_of(job: Job, state: ModelState) -> ModelGeometry:
    """Return a geometry with a parameter of two runs, another rank's parameter, and a copy."""
    geometry = state.geometry([job])
    if not geometry.repeats and len(geometry.parameters[0][1].runs) == 1:
        halves = tuple(Run("fused", (4, 6), (2 * n, 0), (2, 6), 0, 12 * n, 12) for n in (0, 1))
        fused = Geometry("fused", halves, main=True, replica=0, resizable=True)
        (whole,) = geometry.parameters[2][1].runs
        norm = Geometry("norm", (whole,), main=False, replica=0, resizable=False)
        bias = dataclasses.replace(
            geometry.parameters[3][1], main=False, copy=CopyPlace((0, 1), (2, 2))
        )
        for number, changed in ((0, fused), (2, norm), (3, bias)):
            geometry.parameters[number] = (geometry.parameters[number][0], changed)
    return geometry


def owned(job: Job, state: ModelState) -> list[LocalPiece]:
    return local_pieces(state.owned(geometry_of(job, state), [job], job.optimizer))


def described(pieces: list[LocalPiece]) -> list[tuple[Any, ...]]:
    """Return all properties of pieces that a save uses."""
    return [
        (
            *(local.piece, local.early),
            *(
                local.tensor.tolist(),
                local.tensor.data_ptr(),
                local.tensor.dim(),
                local.tensor.requires_grad,
            ),
        )
        for local in pieces
    ]


def looks_at_each_tensor() -> Any:
    """Return a context that counts the reads of an entry's states."""
    return mock.patch.object(
        OptimizerEntry, "states", autospec=True, side_effect=OptimizerEntry.states
    )


def nothing(job: Job) -> None:
    pass


def in_place(job: Job) -> None:
    for tensor in (job.fused.data, job.vector.data, *job.masters, job.states(0)["exp_avg"]):
        tensor.add_(1)


def in_other_memory(job: Job) -> None:
    job.fused.data = torch.randn(4, 6).bfloat16()
    job.masters[0].data = torch.randn(17)
    job.states(1)["exp_avg"].data = torch.randn(5)


def norm_stepped(job: Job) -> None:
    job.states(2)["exp_avg"] = torch.randn(2)


def transposed(job: Job) -> None:
    job.fused.data = torch.randn(6, 4).bfloat16().t()


def moment_replaced(job: Job) -> None:
    job.states(0)["exp_avg"] = torch.randn(17)


def moment_of_another_type(job: Job) -> None:
    job.states(1)["exp_avg"].data = torch.randn(5).bfloat16()


def moment_of_two_axes(job: Job) -> None:
    job.states(0)["exp_avg"].data = torch.randn(17, 1)


def moment_with_gradients(job: Job) -> None:
    job.states(0)["exp_avg"].requires_grad_()


def moments_swapped(job: Job) -> None:
    state = job.states(0)
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def moment_gone(job: Job) -> None:
    del job.states(1)["exp_avg_sq"]


def moment_come(job: Job) -> None:
    job.states(1)["max_exp_avg_sq"] = torch.randn(5)


def moment_let_go(job: Job) -> None:
    """Free a state but keep its name, as some optimizers do."""
    job.states(1)["exp_avg"] = None  # type: ignore[assignment]


def state_of_the_norm_gone(job: Job) -> None:
    """Free the state of a parameter that another rank writes."""
    del job.optimizer.optimizer.state[job.masters[2]]


def states_in_another_order(job: Job) -> None:
    state = job.optimizer.optimizer.state
    state[job.masters[0]] = state.pop(job.masters[0])


def last_state_under_another_key(job: Job) -> None:
    """Keep all values and their order, but take the last state from its parameter."""
    state = job.optimizer.optimizer.state
    state[torch.randn(3)] = state.pop(job.masters[3])


def state_of_no_shard_come(job: Job) -> None:
    job.optimizer.optimizer.state[torch.randn(2)] = {"exp_avg": torch.randn(2)}


def master_replaced(job: Job) -> None:
    state = job.optimizer.optimizer.state
    master = torch.randn(17)
    state[master] = state.pop(job.masters[0])
    job.masters[0] = master


def tables_made_anew(job: Job) -> None:
    job.fill_tables()


def parameter_replaced(job: Job) -> None:
    job.vector = torch.nn.Parameter(torch.randn(5).bfloat16())
    job.fill_tables()


def weights_lag(job: Job) -> None:
    """Overlap the all-gather of weights, as releases before core 0.7 do."""
    job.optimizer.overlap_param_gather, job.optimizer.param_buffer_copied = True, []
    for master in job.masters:
        master.add_(1)


OF_VALUES: list[Callable[[Job], None]] = [nothing, in_place, in_other_memory, norm_stepped]
OF_VALUES += [transposed]
CHANGES = [*OF_VALUES, moments_swapped, moment_replaced, moment_of_another_type]
CHANGES += [moment_of_two_axes, moment_with_gradients, moment_gone, moment_let_go, moment_come]
CHANGES += [state_of_the_norm_gone, states_in_another_order, state_of_no_shard_come]
CHANGES += [last_state_under_another_key]
CHANGES += [master_replaced, tables_made_anew, parameter_replaced, weights_lag]


@pytest.mark.parametrize("change", CHANGES)
def test_a_repeated_enumeration_equals_a_new_one(change: Callable[[Job], None]) -> None:
    job, state = Job(), ModelState(Replicated())
    owned(job, state)
    change(job)
    with looks_at_each_tensor() as looks:
        again = described(owned(job, state))
    # If only values are new, no tensor is looked at.
    assert (looks.call_count == 0) == (change in OF_VALUES)
    afresh = described(owned(job, ModelState(Replicated())))
    if change in (transposed, weights_lag):  # each enumeration makes new copies of the weights
        again, afresh = (
            [(*entry[:3], *entry[4:]) for entry in entries] for entries in (again, afresh)
        )
    assert again == afresh


@pytest.fixture
def repeated_job() -> tuple[Job, ModelState]:
    job, state = Job(), ModelState(Replicated())
    owned(job, state)
    return job, state


def test_a_changed_tensor_is_looked_at_once_also_if_nothing_is_written(
    repeated_job: tuple[Job, ModelState],
) -> None:
    """With `--num-distributed-optimizer-instances` only the first instance writes."""
    other = Job(), ModelState(Replicated())
    other[0].optimizer.distributed_optimizer_instance_id = 1
    moment_replaced(repeated_job[0])
    for job, state in (repeated_job, other):
        with looks_at_each_tensor() as looks:
            for _ in range(2):
                assert bool(owned(job, state)) == (job is not other[0])
                assert looks.call_count == len(OWNED)


@pytest.mark.parametrize("step", [torch.tensor([1.0, 2.0]), 1])
def test_a_repeated_enumeration_refuses_state_that_cannot_be_saved(
    repeated_job: tuple[Job, ModelState], step: Any
) -> None:
    job, state = repeated_job
    job.states(0)["step"] = step
    with pytest.raises(Exception, match="'step'"):
        owned(job, state)


def test_states_of_other_tensors_end_neither_the_save_nor_what_it_holds(
    repeated_job: tuple[Job, ModelState],
) -> None:
    """Torch keeps what a loaded state dict holds under keys that are no parameters."""
    job, state = repeated_job
    job.optimizer.optimizer.state["seed"] = 7
    pieces = described(owned(job, ModelState(Replicated())))
    assert [described(owned(job, state)) for _ in range(2)] == [pieces] * 2


def test_repeated_sections_are_one_object_until_more_than_values_changes(
    repeated_job: tuple[Job, ModelState],
) -> None:
    """The plan of a save is looked up by them."""
    job, state = repeated_job

    def sections() -> list[Section]:
        return state.owned(geometry_of(job, state), [job], job.optimizer).blocks[0][1]

    repeated = sections()
    in_other_memory(job)
    assert sections() is repeated
    moment_of_another_type(job)
    assert sections() is not repeated


def test_an_enumeration_keeps_no_reference_to_tensors(
    repeated_job: tuple[Job, ModelState],
) -> None:
    """A reference would keep tensors on the device that a job offloads between saves."""
    job, state = repeated_job
    pieces: list[LocalPiece] = owned(job, state)
    memory = [weakref.ref(local.tensor.untyped_storage()) for local in pieces]
    moments = [weakref.ref(local.tensor) for local in pieces if local.piece.kind == "exp_avg"]
    del pieces
    for number in range(len(OWNED)):
        job.states(number).clear()
    gc.collect()
    assert [ref() for ref in moments] == [None] * len(moments), (
        "moments are kept alive, although the optimizer freed them"
    )
    for parameter in job.parameters():
        parameter.data = torch.empty(0)
    del job.optimizer
    job.masters.clear()
    gc.collect()
    assert [ref() for ref in memory] == [None] * len(memory)
    assert not state.geometry([job]).repeats
