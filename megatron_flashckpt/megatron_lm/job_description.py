"""Description of the saving run in the manifest, for people and tools."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import package_info

import megatron_flashckpt

Fact = bool | int | float | str | None

_NAMES = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "data_parallel_size",
    "use_distributed_optimizer",
    "num_layers",
    "hidden_size",
    "consumed_train_samples",
)


def versions() -> dict[str, Fact]:
    """Return the versions of the software that saves."""
    return {
        "megatron_flashckpt": megatron_flashckpt.__version__,
        "megatron_core": package_info.__version__,
        "torch": str(torch.__version__),
    }


def facts(args: Any) -> dict[str, Fact]:
    """Return the args of Megatron that distinguish runs."""
    return {name: fact(args, name) for name in _NAMES}


def fact(args: Any, name: str) -> Any:
    """Return an argument's value as a plain number or text; None if it is of another type."""
    value = getattr(args, name, None)
    bases: tuple[Any, ...] = (bool, int, float, str)
    for base in bases:
        if isinstance(value, base):
            # The base's own method: an argument may have a class of its own, with any methods.
            return value if type(value) is base else base.__getnewargs__(value)[0]
    return None
