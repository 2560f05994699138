"""Rules: weights of unsupported classes are refused; a load keeps tensors that a graph reads."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tools.gpu_check import machine
from tools.gpu_check.report import Report


class Wrapper(torch.Tensor):
    """Tensor whose operators run on a dequantized copy, like TransformerEngine's FP8 weights."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Wrapper:
        shape, device = values.shape, values.device
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=device)
        made.raw = values.detach().to(torch.float8_e4m3fn)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].raw)
        plain = [
            argument.raw.to(argument.dtype) if isinstance(argument, cls) else argument
            for argument in args
        ]
        return func(*plain, **(kwargs or {}))


def run(report: Report) -> None:
    """Check a model with such a weight, and load the settings of capturable optimizers."""
    _check_weights(report)
    for how in ("capturable", "fused"):
        _check_settings(report, how)


# ---------------------------------------------------------------------- weights


def _check_weights(report: Report) -> None:
    # A tensor of the simulated node is itself a wrapper, so it is not used here.
    values = torch.randn(16, 32, device=machine.pick("cuda", "cpu")).bfloat16()
    refused = _refusal(values)
    report.must("a job with plain weights is accepted", refused == "", refused)
    refused = _refusal(Wrapper(values))
    named = [line.strip() for line in refused.splitlines() if "matrix" in line]
    detail = "".join(named).partition(";")[0]
    report.must("a weight of a wrapper class is refused by name", bool(named), detail)


def _refusal(values: torch.Tensor) -> str:
    """Return the error of the self-check for a job with this weight; empty if it passes."""
    from megatron_flashckpt.config import Replicated
    from megatron_flashckpt.errors import UnsupportedError
    from megatron_flashckpt.megatron_lm import parallel, self_check
    from megatron_flashckpt.megatron_lm.job_state import JobState
    from megatron_flashckpt.megatron_lm.model_state import ModelState

    job = _job(values)
    with mock.patch.object(parallel, "data_parallel", return_value=(1, 0)):
        try:
            state = ModelState(Replicated())
            self_check.check(JobState(chunks=[job], optimizer=job.optimizer), state)
        except UnsupportedError as error:
            return str(error)
    return ""


def _job(values: torch.Tensor) -> Any:
    """Return a model with one weight, and Megatron's optimizer around its master."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    class Job(torch.nn.Module):
        def sharded_state_dict(self) -> Any:
            return {
                name: ShardedTensor.from_rank_offsets(name, tensor)
                for name, tensor in self.named_parameters()
            }

    job = Job()
    job.matrix = torch.nn.Parameter(values)
    master = torch.nn.Parameter(torch.zeros(values.shape, device=values.device))
    optimizer = Float16OptimizerWithFloat16Params.__new__(Float16OptimizerWithFloat16Params)
    optimizer.float16_groups = [[job.matrix]]
    optimizer.fp32_from_float16_groups = [[master]]
    optimizer.fp32_from_fp32_groups = [[]]
    optimizer.is_stub_optimizer = False
    optimizer.grad_scaler = None
    optimizer.optimizer = torch.optim.Adam([master])
    master.grad = torch.ones_like(master)
    optimizer.optimizer.step()
    job.optimizer = optimizer
    return job


# ---------------------------------------------------------------------- settings


def _check_settings(report: Report, how: str) -> None:
    """Load the learning rate and the step of one optimizer into another."""
    from megatron_flashckpt.megatron_lm import side_state_codec
    from megatron_flashckpt.megatron_lm.hyper_parameters import (
        hyper_parameters,
        load_hyper_parameters,
    )

    saving, loading = _optimizer(how, 0.5, steps=3), _optimizer(how, 0.25, steps=1)
    encoded = side_state_codec.encode(hyper_parameters(saving))
    before = _read_by_a_graph(loading)
    load_hyper_parameters(loading, side_state_codec.decode(encoded, "the checkpoint"))
    after = _read_by_a_graph(loading)
    for name in before:
        same = before[name] is after[name]
        report.must(f"{how}: a load overwrites the {name} in place", same)
        report.must(f"{how}: the {name} stays on the GPU", after[name].is_cuda)
    loaded = [float(value.item()) for value in after.values()]
    report.must(f"{how}: learning rate and step are loaded", loaded == [0.5, 3.0], str(loaded))


def _optimizer(how: str, rate: float, steps: int) -> Any:
    """Return Megatron's wrapper of an optimizer that has stepped on the GPU."""
    from megatron.core.optimizer.optimizer import FP32Optimizer

    parameter = torch.ones(8, device="cuda")
    parameter.grad = torch.ones_like(parameter)
    group = {"params": [parameter], "wd_mult": 1.0, "lr_mult": 1.0}
    group |= {"is_expert_parallel": False, "is_decoupled_lr": False}
    settings = {how: True} if machine.simulated_node is None else {"foreach": False}
    rate_tensor = torch.tensor(rate, device="cuda")
    inner = torch.optim.AdamW([group], lr=rate_tensor, **settings)
    if machine.simulated_node is not None:
        _pretend(inner, how, steps)
    else:
        for _ in range(steps):
            inner.step()
    made = FP32Optimizer.__new__(FP32Optimizer)
    made.optimizer, made.is_stub_optimizer = inner, False
    made.config = made.grad_scaler = None
    return made


def _pretend(inner: torch.optim.Optimizer, how: str, steps: int) -> None:
    """Give an optimizer the state after `steps` steps; its kernels need a real device."""
    (group,) = inner.param_groups
    group[how] = True
    (parameter,) = group["params"]
    kinds = ("exp_avg", "exp_avg_sq")
    inner.state[parameter] = {kind: torch.zeros_like(parameter) for kind in kinds}
    inner.state[parameter]["step"] = torch.tensor(float(steps), device="cuda")


def _read_by_a_graph(optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a captured step reads besides parameters and their states."""
    (group,) = optimizer.optimizer.param_groups
    (parameter,) = group["params"]
    return {
        "learning rate": group["lr"],
        "step": optimizer.optimizer.state[parameter]["step"],
    }
