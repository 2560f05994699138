"""Stand-ins for packages that need a GPU, with the same state; for `flag_cells.py`.

`emerging` is NVIDIA's package of that name, with Muon and Lion (`tests/cpu_megatron/stubs`).
`fused_adam` is TransformerEngine's optimizer as Megatron sees it under
--use-precision-aware-optimizer. `devices` distinguishes parameters on "the GPU" from host copies,
as --optimizer-cpu-offload requires; the optimizer on top is Megatron's own. `saving_loader` is a
data loader with a state.
`group_marks` stands for core 0.19, which has more marks of param groups.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import megatron.core.optimizer as optimizers
import megatron.core.utils as core_utils
import torch
import torch.distributed as dist
from megatron.core.optimizer import HybridDeviceOptimizer, distrib_optimizer, muon, optimizer
from megatron.training import training
from packaging.version import Version

from tests.cpu_megatron.stubs.emerging_optimizers import emerging_optimizers


class FusedAdam(torch.optim.Optimizer):
    """Steps 16-bit weights; its states hold the fp32 masters, or the bits that weights lack."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": True})
        self.master_weights = master_weights
        self.store_param_remainders = store_param_remainders
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        state = self.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(param, dtype=self.name_to_dtype_map[name])
        if self.master_weights and store_param_remainders:
            state["master_param"] = torch.zeros_like(param, dtype=torch.int16)
        elif self.master_weights:
            state["master_param"] = param.detach().clone().float()

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        held = self.state[param][name]
        return held if held.dtype in (torch.int16, torch.float32) else held.float()

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        if name not in self.state[param]:
            self.initialize_state(param, self._remainders(param))
        self.state[param][name].copy_(value)

    def _remainders(self, param: torch.Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        numbered = [param for group in self.param_groups for param in group["params"]]
        for number, saved in state_dict["state"].items():  # torch's own method has cast them
            self.state[numbered[number]] = {}
            for name, value in saved.items():
                self.set_scaled_state(numbered[number], name, value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            b1, b2 = group["betas"]
            c1, c2 = 1 - b1 ** group["step"], 1 - b2 ** group["step"]
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", param.grad)
                if grad is None:
                    continue
                if param not in self.state:
                    self.initialize_state(param, self._remainders(param))
                state, grad = self.state[param], grad.float()
                first = self.get_unscaled_state(param, "exp_avg").lerp(grad, 1 - b1)
                second = self.get_unscaled_state(param, "exp_avg_sq") * b2 + (1 - b2) * grad**2
                master = self._master(param)
                master = master * (1 - group["lr"] * group["weight_decay"])
                master = master - group["lr"] / c1 * first / ((second / c2).sqrt() + group["eps"])
                state["exp_avg"].copy_(first)
                state["exp_avg_sq"].copy_(second)
                self._put(param, master)

    def _master(self, param: torch.Tensor) -> torch.Tensor:
        if not self.master_weights:
            return param.float()
        held = self.state[param]["master_param"]
        if held.dtype != torch.int16:
            return held
        rest = held.int()
        high = param.view(torch.int16).int() - (rest < 0).int()
        return ((high << 16) | (rest & 0xFFFF)).view(torch.float32)

    def _put(self, param: torch.Tensor, master: torch.Tensor) -> None:
        if not self._remainders(param):
            if self.master_weights:
                self.state[param]["master_param"].copy_(master)
            param.copy_(master)
            return
        bits = master.view(torch.int32)
        rest = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
        self.state[param]["master_param"].copy_(rest)
        param.copy_(((bits >> 16) + (rest < 0).int()).to(torch.int16).view(torch.bfloat16))


@contextlib.contextmanager
def fused_adam() -> Iterator[None]:
    """Let Megatron find the optimizer of TransformerEngine 2.3."""
    engine = types.ModuleType("transformer_engine")
    engine.__version__ = "2.3.0"
    home = types.ModuleType("transformer_engine.pytorch.optimizers")
    home.FusedAdam = FusedAdam
    modules = {
        "transformer_engine": engine,
        "transformer_engine.pytorch": types.ModuleType("transformer_engine.pytorch"),
        home.__name__: home,
    }
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(core_utils, "_te_version", Version(engine.__version__)),
        mock.patch.object(optimizers, "Adam", FusedAdam),
        mock.patch.object(distrib_optimizer, "Adam", FusedAdam),
        mock.patch.object(distrib_optimizer, "USING_TE_OPTIMIZER", True),
    ):
        yield


@contextlib.contextmanager
def devices() -> Iterator[None]:
    """Report all tensors but host copies as GPU tensors while Megatron chooses what to offload."""
    choose = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    names = ("cpu", "pin_memory", "detach", "clone", "float")
    real = {name: getattr(torch.Tensor, name) for name in names}

    def moved(name: str) -> Any:
        def method(self: torch.Tensor) -> torch.Tensor:
            made = real[name](self)
            made._on_host = name in ("cpu", "pin_memory") or not self.is_cuda
            return made

        return method

    def chosen(self: Any, fraction: float) -> Any:
        on_gpu = property(lambda tensor: not getattr(tensor, "_on_host", False))
        with mock.patch.multiple(
            torch.Tensor, **{name: moved(name) for name in real}, is_cuda=on_gpu
        ):
            return choose(self, fraction)

    with mock.patch.object(HybridDeviceOptimizer, choose.__name__, chosen):
        yield


def all_gather(
    gathered: list[torch.Tensor], own: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Gather tensors of unequal sizes, as NCCL does and gloo does not."""
    if len({tensor.numel() for tensor in gathered}) == 1:
        return _all_gather(gathered, own, group, async_op)
    gathered[dist.get_rank(group)].copy_(own)
    for rank, tensor in enumerate(gathered):
        if tensor.numel():
            dist.broadcast(tensor, dist.get_global_rank(group, rank), group)
    return None


_all_gather = dist.all_gather


@contextlib.contextmanager
def emerging() -> Iterator[None]:
    """Let Megatron find emerging_optimizers 0.2."""
    sys.modules.setdefault("emerging_optimizers", emerging_optimizers)
    with contextlib.ExitStack() as stack:
        for name in ("HAVE_EMERGING_OPTIMIZERS", "HAVE_EO_V02"):
            stack.enter_context(mock.patch.object(optimizers, name, True))
        stack.enter_context(mock.patch.object(dist, "all_gather", all_gather))
        lion = importlib.import_module("emerging_optimizers.scalar_optimizers").Lion
        stack.enter_context(mock.patch.object(optimizers, "Lion", lion, create=True))
        make = importlib.reload(muon).get_megatron_muon_optimizer
        stack.enter_context(mock.patch.object(training, make.__name__, make))
        yield


@contextlib.contextmanager
def saving_loader() -> Iterator[None]:
    """Give data loaders a state to save, as those of Megatron Energon have."""
    kind = torch.utils.data.dataloader._BaseDataLoaderIter
    kind.save_state = lambda loader: {"rows": loader._num_yielded}
    try:
        yield
    finally:
        del kind.save_state


@contextlib.contextmanager
def group_marks() -> Iterator[None]:
    """Identify param groups as core 0.19 does.

    0.17.1 gives all groups that share its four marks the settings of the last one.
    """
    marks = (*optimizer.param_group_identifier_keys, "max_lr", "min_lr", "eps")
    with (
        mock.patch.object(optimizer, "param_group_identifier_keys", marks),
        mock.patch.object(distrib_optimizer, "param_group_identifier_keys", marks),
    ):
        yield


STAND_INS = {
    "group_marks": group_marks,
    "saving_loader": saving_loader,
    "emerging": emerging,
    "fused_adam": fused_adam,
    "devices": devices,
}
