"""How parameters of Megatron's legacy GPT lie in the global tensors (`megatron.model`, early 2024).

That model has no `sharded_state_dict`. What is needed is in the attributes that its layers set on
their parameters (`tensor_model_parallel`, `partition_dim`, `partition_stride`) and in each layer's
own `layer_number`. Keys are the names in its state dict, like layers stacked along a first axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.runs import Geometry, Run
from megatron_flashckpt.megatron_lm.stock import checkpointing

_LAYER = re.compile(r"(?P<layers>.*\.layers)\.(?P<index>\d+)\.(?P<rest>.*)")
_WORDS = "language_model.embedding.word_embeddings.weight"
#: The copy of the word embeddings that the last pipeline stage has if they are tied.
_TIED = "word_embeddings.weight"
#: Their first axis is padded for the tensor parallel size.
_RESIZABLE = (_WORDS, _TIED, "language_model.output_layer.weight")
#: With SwiGLU the gate and the other half lie one after the other in the local tensor.
_FUSED = (".dense_h_to_4h.weight", ".dense_h_to_4h.bias")


def parameters(chunk: Any) -> list[tuple[torch.nn.Parameter, Geometry]]:
    """Return every parameter of an unwrapped model chunk with its geometry. No communication.

    Raises:
        UnsupportedError: another model than GPT, experts, or a cut that is not known.
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
    key = _WORDS if name == _TIED else name
    stacked: tuple[tuple[int, int], ...] = ()
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer = modules[f"{match['layers']}.{match['index']}"]
        key = f"{match['layers']}.{match['rest']}"
        stacked = ((args.num_layers, layer.layer_number - 1),)
    cut = bool(getattr(parameter, "tensor_model_parallel", False))
    rank = parallel_state.get_tensor_model_parallel_rank()
    duplicate = (int(name == _TIED), 0 if cut else rank)
    return Geometry(
        name=name,
        runs=tuple(_runs(name, key, parameter, stacked, args, cut)),
        main=not any(duplicate),
        replica=parallel.data_parallel()[1],
        resizable=name in _RESIZABLE,
        copy="{}.{}".format(*duplicate) if any(duplicate) else "",
    )


def _runs(
    name: str,
    key: str,
    parameter: Any,
    stacked: tuple[tuple[int, int], ...],
    args: Any,
    cut: bool,
) -> Iterator[Run]:
    """Yield one run per stride: part `i` of the local tensor is part `i * TP + rank` of all."""
    axis, strides, size, rank = 0, 1, 1, 0
    if cut:
        axis, strides = parameter.partition_dim, parameter.partition_stride
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        if getattr(args, "swiglu", False) and name.endswith(_FUSED):
            strides *= 2
    if strides > 1 and axis != 0:
        raise UnsupportedError(
            f"{name}: is cut along axis {axis} in {strides} strides, which this release does not "
            "save; use --use-mcore-models"
        )
    local = list(parameter.shape)
    whole = [extent * (size if n == axis else 1) for n, extent in enumerate(local)]
    local[axis] //= strides
    numel = math.prod(local)
    for part in range(strides):
        offset = [0] * len(local)
        offset[axis] = (part * size + rank) * local[axis]
        yield Run(
            key,
            (*(extent for extent, _ in stacked), *whole),
            (*(index for _, index in stacked), *offset),
            (*(1 for _ in stacked), *local),
            0,
            part * numel,
            numel,
        )
