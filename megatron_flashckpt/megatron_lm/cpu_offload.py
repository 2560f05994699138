"""`--optimizer-cpu-offload`: Megatron's optimizer over optimizers, some of which live on the CPU.

`HybridDeviceOptimizer` lists the shards of the model's parameters. Optimizers below it step copies
of them: fp32 ones of 16-bit parameters, and of all whose states are to be in host memory.
"""

from __future__ import annotations

from typing import Any

import torch


def is_offloading(inner: torch.optim.Optimizer) -> bool:
    """Return whether `inner` is such an optimizer."""
    return hasattr(inner, "param_to_inner_param") and hasattr(inner, "sub_optimizers")


def below(inner: Any) -> list[Any]:
    """Return the optimizers that take the steps: those below `inner`, or `inner` itself."""
    return list(inner.sub_optimizers) if is_offloading(inner) else [inner]


def steppers(inner: Any) -> dict[int, torch.optim.Optimizer]:
    """Return, by the id of a tensor that is stepped, which optimizer does."""
    return {
        id(parameter): optimizer
        for optimizer in below(inner)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def groups_below(inner: Any, group: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return the optimizers that step what `group` of `inner` lists, with their groups of it."""
    if not is_offloading(inner):
        return [(inner, group)]
    stepped = {id(inner.param_to_inner_param[parameter]) for parameter in group["params"]}
    return [
        (optimizer, theirs)
        for optimizer in below(inner)
        for theirs in optimizer.param_groups
        if any(id(parameter) in stepped for parameter in theirs["params"])
    ]


def finish_loading(inner: Any) -> None:
    """Have `inner` list the states of the optimizers below it as its own, as after a step."""
    if is_offloading(inner):
        inner._sync_sub_optimizers_state_to_hdo()
