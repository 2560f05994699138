"""What the manifest says of the run that a checkpoint comes from, for people and tools."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import package_info

import megatron_flashckpt

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


def describe(args: Any) -> dict[str, Any]:
    """Return the releases that are in use, and the args that tell runs apart."""
    return {
        "megatron_flashckpt": megatron_flashckpt.__version__,
        "megatron_core": package_info.__version__,
        "torch": str(torch.__version__),
        **{name: getattr(args, name, None) for name in _NAMES},
    }
