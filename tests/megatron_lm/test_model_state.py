"""Pieces of local tensors: views wherever that is possible, and none made twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from megatron_flashckpt.config import Replicated
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.cutting import LocalPiece, cut
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry, Run


def halves() -> Geometry:
    """Two boxes in one local tensor of 4 x 6, as SwiGLU has them."""
    runs = tuple(Run("fc1", (4, 6), (2 * n, 0), (2, 6), 0, 12 * n, 12) for n in (0, 1))
    return Geometry("fc1.weight", runs, main=True, replica=0, resizable=False)


def storages(pieces: list[LocalPiece]) -> set[int]:
    return {local.tensor.untyped_storage().data_ptr() for local in pieces}


def test_pieces_are_views_without_gradients() -> None:
    parameter = torch.nn.Parameter(torch.arange(24.0).view(4, 6))
    pieces = cut(halves(), "weight", parameter, 0, 24)
    assert [local.tensor.tolist() for local in pieces] == [
        list(map(float, range(12))),
        list(map(float, range(12, 24))),
    ]
    assert storages(pieces) == {parameter.untyped_storage().data_ptr()}
    assert not any(local.tensor.requires_grad for local in pieces)


def test_a_range_within_one_box_is_one_piece() -> None:
    flat = torch.arange(24.0)
    (only,) = cut(halves(), "master", flat[13:20], 13, 20)
    assert (only.piece.start, only.piece.end, only.piece.offset) == (1, 8, (2, 0))
    assert torch.equal(only.tensor, flat[13:20])


def test_a_tensor_that_is_not_contiguous_is_copied_once_for_all_its_pieces() -> None:
    transposed = torch.arange(24.0).view(6, 4).t()
    pieces = cut(halves(), "weight", transposed, 0, 24)
    assert len(storages(pieces)) == 1
    assert torch.equal(torch.cat([local.tensor for local in pieces]), transposed.reshape(-1))


def test_another_save_has_the_same_pieces_and_other_tensors() -> None:
    geometry = halves()
    before = cut(geometry, "weight", torch.zeros(4, 6), 0, 24)
    after = cut(geometry, "weight", torch.ones(4, 6), 0, 24)
    assert all(a.piece is b.piece for a, b in zip(before, after, strict=True))
    assert [float(local.tensor.sum()) for local in after] == [12.0, 12.0]
    (other, _) = cut(geometry, "weight", torch.ones(4, 6, dtype=torch.bfloat16), 0, 24)
    assert (other.piece.dtype, after[0].piece.dtype) == ("BF16", "F32")


class Job(torch.nn.Module):
    """Two 16-bit weights and an expert bias, and Megatron's optimizer around masters of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.matrix = torch.nn.Parameter(torch.randn(4, 6).bfloat16())
        self.layer.vector = torch.nn.Parameter(torch.randn(5).bfloat16())
        self.register_buffer("bias", torch.randn(3))
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.parameters()]
        optimizer = Float16OptimizerWithFloat16Params.__new__(Float16OptimizerWithFloat16Params)
        optimizer.float16_groups = [list(self.parameters())]
        optimizer.fp32_from_float16_groups = [self.masters]
        optimizer.fp32_from_fp32_groups = [[]]
        optimizer.is_stub_optimizer = False
        optimizer.optimizer = torch.optim.Adam(self.masters)
        self.optimizer = optimizer
        for master in self.masters:
            state = {"step": torch.tensor(1.0)}
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = torch.randn_like(master.detach())
            optimizer.optimizer.state[master] = state

    def named(self) -> dict[str, torch.Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def sharded_state_dict(self) -> dict[str, ShardedTensor]:
        return {
            name: ShardedTensor.from_rank_offsets(name, tensor)
            for name, tensor in self.named().items()
        }

    def states(self, number: int) -> dict[str, torch.Tensor]:
        return self.optimizer.optimizer.state[self.masters[number]]

    def held(self) -> dict[tuple[str, str], torch.Tensor]:
        """Everything that there is to be saved at this moment, by kind and key."""
        found = {
            ("buffer" if name == "bias" else "weight", name): it
            for name, it in self.named().items()
        }
        names = [name for name, _ in self.named_parameters()]
        for name, master in zip(names, self.masters, strict=False):
            found["master", name] = master
            for kind, it in self.optimizer.optimizer.state.get(master, {}).items():
                if kind != "step":
                    found[kind, name] = it
        return {place: it.detach().clone() for place, it in found.items()}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "data_parallel", lambda: (1, 0))


def in_other_memory(job: Job) -> None:
    job.layer.matrix.data = torch.randn(4, 6).bfloat16()


def in_place(job: Job) -> None:
    for it in job.named().values():
        it.detach().add_(1)


def swapped(job: Job) -> None:
    """As for an evaluation with averaged weights; the parameter's own memory lives on."""
    job.kept = job.layer.vector.data
    job.layer.vector.data = torch.randn(5).bfloat16()


def transposed(job: Job) -> None:
    """The same memory, the same number of elements, another order."""
    state = job.states(0)["exp_avg"]
    state.data = state.data.view(6, 4).t()


def of_another_shape(job: Job) -> None:
    for it in (job.layer.matrix, job.masters[0], *job.states(0).values()):
        it.data = it.data.reshape(it.shape[::-1])


def moments_replaced(job: Job) -> None:
    job.states(0)["exp_avg"] = torch.randn(4, 6)


def moments_swapped(job: Job) -> None:
    state = job.states(0)
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def moment_of_another_type(job: Job) -> None:
    job.states(1)["exp_avg"] = job.states(1)["exp_avg"].bfloat16()


def moment_gone(job: Job) -> None:
    del job.states(1)["exp_avg_sq"]


def moment_come(job: Job) -> None:
    job.states(1)["max_exp_avg_sq"] = torch.randn(5)


def parameter_replaced(job: Job) -> None:
    job.layer.vector = torch.nn.Parameter(torch.randn(5).bfloat16())
    job.optimizer.float16_groups[0][1] = job.layer.vector


def parameter_come(job: Job) -> None:
    """A frozen one, below a module that was not there."""
    job.head = torch.nn.Module()
    job.head.scale = torch.nn.Parameter(torch.randn(2).bfloat16(), requires_grad=False)


def buffer_replaced(job: Job) -> None:
    job.bias = torch.randn(3)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "change",
    [
        *(in_place, in_other_memory, swapped, transposed, of_another_shape, parameter_replaced),
        *(moments_replaced, moments_swapped, moment_of_another_type, moment_gone, moment_come),
        *(parameter_come, buffer_replaced),
    ],
)
def test_the_next_save_has_what_is_there_then(change: Callable[[Job], None]) -> None:
    job, state = Job(), ModelState(Replicated())
    for act in (lambda _: None, change):
        act(job)
        pieces = state.owned(state.geometry([job]), [job], job.optimizer)
        held = job.held()
        found = {(it.piece.kind, it.piece.key): it for it in pieces}
        assert found.keys() == held.keys()
        for place, expected in held.items():
            assert torch.equal(found[place].tensor, expected.reshape(-1)), place
            assert found[place].piece.shape == expected.shape or place[0] != "weight"


@pytest.mark.usefixtures("alone")
def test_no_tensor_is_kept_alive_for_the_next_save() -> None:
    """What a job moves off its device between saves must not stay there on our account."""
    job, state = Job(), ModelState(Replicated())
    pieces: list[Any] = state.owned(state.geometry([job]), [job], job.optimizer)
    memory = [weakref.ref(it.tensor.untyped_storage()) for it in pieces]
    del pieces
    assert None not in [ref() for ref in memory]
    for parameter in (*job.parameters(), *job.masters):
        parameter.data = torch.empty(0)
    for number in (0, 1):
        job.states(number).clear()
    job.bias = None
    gc.collect()
    assert [ref() for ref in memory] == [None] * len(memory)
