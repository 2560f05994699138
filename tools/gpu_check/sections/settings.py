"""Rule: a load keeps the tensors that a captured step reads."""

from __future__ import annotations

from typing import Any

import torch

from tools.gpu_check import machine
from tools.gpu_check.report import Report


def run(report: Report) -> None:
    """Load the settings of capturable and fused optimizers."""
    for how in ("capturable", "fused"):
        _check_settings(report, how)


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
