"""Positions of the legacy GPT's parameters in global tensors (`megatron.model`, early 2024).

The legacy model has no `sharded_state_dict`. Its layers set the needed attributes on their
parameters (`tensor_model_parallel`, `partition_dim`, `partition_stride`), and each layer has a
`layer_number`. Keys are names of the state dict; equal layers are stacked along a first axis.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.rebuild.legacy_gpt import Layer, Sharding, geometry
from megatron_flashckpt.megatron_lm.stock import checkpointing
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry

_LAYER = re.compile(r"(?P<layers>language_model\.encoder\.layers)\.(?P<index>\d+)\.(?P<rest>.*)")


def parameters(chunk: Any) -> list[tuple[torch.nn.Parameter, Geometry]]:
    """Return every parameter of an unwrapped model chunk with its geometry. No communication.

    Raises:
        UnsupportedError: the model is no GPT, has experts, or is sharded in an unknown way.
    """
    language_model = getattr(chunk, "language_model", None)
    if getattr(language_model, "encoder", None) is None or getattr(language_model, "decoder", None):
        raise UnsupportedError(
            f"{type(chunk).__name__} has no sharded_state_dict, so where its parameters belong is "
            "unknown: use a megatron.core model (--use-mcore-models in old releases)"
        )
    args = checkpointing().get_args()
    modules = dict(chunk.named_modules())
    return [
        (parameter, _geometry(name, parameter, modules, args))
        for name, parameter in chunk.named_parameters()
    ]


def _geometry(
    name: str, parameter: torch.nn.Parameter, modules: dict[str, Any], args: Any
) -> Geometry:
    if not getattr(parameter, "allreduce", True):
        raise UnsupportedError(
            f"{name}: experts of Megatron's legacy models are not saved by this release; use "
            "--use-mcore-models"
        )
    match = _LAYER.fullmatch(name)
    layer = None
    if match is not None:
        module = modules[f"{match['layers']}.{match['index']}"]
        layer = Layer(module.layer_number - 1, args.num_layers)
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    sharding = None
    if getattr(parameter, "tensor_model_parallel", False):
        sharding = Sharding(parameter.partition_dim, size, rank, parameter.partition_stride)  # type: ignore[attr-defined]
    return geometry(
        name,
        tuple(parameter.shape),
        layer=layer,
        sharding=sharding,
        swiglu=bool(getattr(args, "swiglu", False)),
        tensor_rank=(rank, size),
        replica=parallel.data_parallel()[1],
    )
