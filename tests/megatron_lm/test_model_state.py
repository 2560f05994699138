"""Pieces of local tensors: views if possible, and each created once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from megatron_flashckpt.config import Replicated
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.cutting import LocalPiece, cut
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry, Run
from tests.support.enumerations import local_pieces


def halves() -> Geometry:
    """Return a geometry of two boxes in one local tensor of 4 x 6, as for SwiGLU."""
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


def test_a_non_contiguous_tensor_is_copied_once_for_all_pieces() -> None:
    transposed = torch.arange(24.0).view(6, 4).t()
    pieces = cut(halves(), "weight", transposed, 0, 24)
    assert len(storages(pieces)) == 1
    assert torch.equal(torch.cat([local.tensor for local in pieces]), transposed.reshape(-1))


def test_a_later_save_reuses_pieces_of_the_same_type() -> None:
    geometry, weight = halves(), torch.zeros(4, 6)
    before, after = (cut(geometry, "weight", weight, 0, 24) for _ in range(2))
    assert all(a.piece is b.piece for a, b in zip(before, after, strict=True))
    (other, _) = cut(geometry, "weight", weight.bfloat16(), 0, 24)
    assert (other.piece.dtype, after[0].piece.dtype) == ("BF16", "F32")


class Job(torch.nn.Module):
    """Two 16-bit weights, an expert bias, and Megatron's optimizer with their masters."""

    def __init__(self, replica: int = 0) -> None:
        super().__init__()
        self.replica = replica
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
            name: ShardedTensor.from_rank_offsets(name, tensor, replica_id=self.replica)
            for name, tensor in self.named().items()
        }

    def states(self, number: int) -> dict[str, torch.Tensor]:
        return self.optimizer.optimizer.state[self.masters[number]]

    def held(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return all tensors that a save must contain now, by kind and key."""
        tensors = {
            ("buffer" if name == "bias" else "weight", name): tensor
            for name, tensor in self.named().items()
        }
        names = [name for name, _ in self.named_parameters()]
        for name, master in zip(names, self.masters, strict=False):
            tensors["master", name] = master
            for kind, tensor in self.optimizer.optimizer.state.get(master, {}).items():
                if kind != "step":
                    tensors[kind, name] = tensor
        return {place: tensor.detach().clone() for place, tensor in tensors.items()}


@pytest.fixture
def single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "data_parallel", lambda: (1, 0))


def in_other_memory(job: Job) -> None:
    job.layer.matrix.data = torch.randn(4, 6).bfloat16()


def in_place(job: Job) -> None:
    for tensor in job.named().values():
        tensor.detach().add_(1)


def transposed(job: Job) -> None:
    """Keep memory and number of elements, but change their order."""
    state = job.states(0)["exp_avg"]
    state.data = state.data.view(6, 4).t()


def of_another_shape(job: Job) -> None:
    for tensor in (job.layer.matrix, job.masters[0], *job.states(0).values()):
        tensor.data = tensor.data.reshape(tensor.shape[::-1])


def parameter_replaced(job: Job) -> None:
    job.layer.vector = torch.nn.Parameter(torch.randn(5).bfloat16())
    job.optimizer.float16_groups[0][1] = job.layer.vector


def parameter_come(job: Job) -> None:
    """Add a frozen parameter in a new module."""
    job.head = torch.nn.Module()
    job.head.scale = torch.nn.Parameter(torch.randn(2).bfloat16(), requires_grad=False)


def buffer_replaced(job: Job) -> None:
    job.bias = torch.randn(3)


def module_replaced(job: Job) -> None:
    """Wrap the parameters in another module, as a replaced layer does that shares its weights."""
    former = job.layer
    job.layer = torch.nn.Module()
    job.layer.matrix, job.layer.vector = former.matrix, former.vector


def module_renamed(job: Job) -> None:
    children = {"block" if name == "layer" else name: job._modules[name] for name in job._modules}
    job._modules = children


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(
    "change",
    [
        *(in_place, in_other_memory, transposed, of_another_shape),
        *(parameter_replaced, parameter_come, buffer_replaced),
    ],
)
def test_a_save_takes_the_current_tensors_after_any_change(change: Callable[[Job], None]) -> None:
    job, state = Job(), ModelState(Replicated())
    for act in (lambda _: None, change):
        act(job)
        pieces = local_pieces(state.owned(state.geometry([job]), [job], job.optimizer))
        held = job.held()
        pieces_by_key = {(local.piece.kind, local.piece.key): local for local in pieces}
        assert pieces_by_key.keys() == held.keys()
        for place, expected in held.items():
            assert torch.equal(pieces_by_key[place].tensor, expected.reshape(-1)), place
            assert pieces_by_key[place].piece.shape == expected.shape or place[0] != "weight"


def test_replicas_write_every_element_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Counter[tuple[str, str]]()
    for replica in range(3):
        monkeypatch.setattr(parallel, "data_parallel", lambda number=replica: (3, number))
        job, state = Job(replica), ModelState(Replicated())
        owned = state.owned(state.geometry([job]), [job], job.optimizer)
        for piece in owned.pieces:
            written[piece.kind, piece.key] += piece.numel
    assert written == {place: tensor.numel() for place, tensor in Job().held().items()}


def module_moved(job: Job) -> None:
    """Move a child to the next module: the order of all modules stays the same."""
    job.right.leaf = job.left._modules.pop("leaf")


def parameter_moved(job: Job) -> None:
    """Move a parameter to the next module: the order of all parameters stays the same."""
    job.right.scale = job.left._parameters.pop("scale")


@pytest.mark.parametrize("change", [module_replaced, module_renamed, module_moved, parameter_moved])
def test_a_geometry_is_computed_anew_when_a_module_changes(change: Callable[[Job], None]) -> None:
    """The parameters stay the same; the modules' extra states are looked up once per geometry."""
    job, state = Job(), ModelState(Replicated())
    job.left, job.right = torch.nn.Module(), torch.nn.Module()
    job.left.leaf = torch.nn.Identity()
    job.left.scale = torch.nn.Parameter(torch.ones(1))
    before = state.geometry([job])
    assert state.geometry([job]) is before
    change(job)
    assert state.geometry([job]) is not before
