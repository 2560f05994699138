"""Support for `--optimizer-cpu-offload`: one optimizer that delegates steps to CPU and GPU ones.

Megatron's `HybridDeviceOptimizer` lists the shards of the model's parameters. Its sub-optimizers
step copies of these shards: fp32 copies of 16-bit parameters, and host copies of all parameters
whose states belong in host memory.
"""

from __future__ import annotations

from typing import Any

import torch


def is_offloading(inner: torch.optim.Optimizer) -> bool:
    """Return whether `inner` is a `HybridDeviceOptimizer`."""
    return hasattr(inner, "param_to_inner_param") and hasattr(inner, "sub_optimizers")


def below(inner: Any) -> list[Any]:
    """Return the optimizers that step tensors: the sub-optimizers of `inner`, or `inner` itself."""
    return list(inner.sub_optimizers) if is_offloading(inner) else [inner]


def steppers(inner: Any) -> dict[int, torch.optim.Optimizer]:
    """Return the optimizer that steps a tensor, by the id of the tensor."""
    return {
        id(parameter): optimizer
        for optimizer in below(inner)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def groups_below(inner: Any, group: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return the optimizers that step parameters of `group`, each with its own group of them.

    Args:
        group: a param group of `inner`.
    """
    if not is_offloading(inner):
        return [(inner, group)]
    stepped = {id(inner.param_to_inner_param[parameter]) for parameter in group["params"]}
    return [
        (optimizer, group_below)
        for optimizer in below(inner)
        for group_below in optimizer.param_groups
        if any(id(parameter) in stepped for parameter in group_below["params"])
    ]


def finish_loading(inner: Any) -> None:
    """Copy the sub-optimizers' states into the state table of `inner`, as a step does."""
    if is_offloading(inner):
        inner._sync_sub_optimizers_state_to_hdo()
