"""FP8 and FP4 weights: parameters of tensor classes that run every operator themselves.

TransformerEngine's `QuantizedTensor` has a nominal 16-bit dtype and stores its bytes in other
tensors. A slice of such a weight is a dequantized copy: a save would store other values than
training uses, and a load into a slice would change nothing. So a save stores only the fp32 masters.

After an optimizer step Megatron quantizes the masters that each replica owns and gathers the
weights of the other replicas. The same two calls after a load reproduce the saved weights.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from megatron_flashckpt.megatron_lm.compat import exists
from megatron_flashckpt.megatron_lm.optimizer_state import (
    DistributedOptimizer,
    reuses_gradient_buffer,
    sub_optimizers,
)

#: Modules of megatron.core and their functions that recognize classes Megatron can quantize into.
_RECOGNIZERS = {"fp8_utils": "is_float8tensor", "fp4_utils": "is_nvfp4tensor"}
#: Settings of DDP under which Megatron quantizes masters when it copies them to weights.
_SETTINGS = ("fp8_param_gather", "fp4_param_gather")
#: Attributes of a model chunk that `_gather` uses; releases before core 0.9 lack some of them.
_GATHERERS = ("ddp_config", "start_param_sync", "bucket_groups", "expert_parallel_bucket_groups")


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether the class of `tensor` runs operators itself: its bytes are elsewhere.

    `torch.nn.Parameter` and other classes without separate storage do not.
    """
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_known_to_megatron(tensor: torch.Tensor) -> bool:
    """Return whether Megatron quantizes masters into tensors of this class."""
    for module, recognizer in _RECOGNIZERS.items():
        home = f"megatron.core.{module}"
        if exists(home) and getattr(importlib.import_module(home), recognizer)(tensor):
            return True
    return False


def quantizes_masters(sub: Any) -> bool:
    """Return whether `fill_from_masters` works for the DistributedOptimizer `sub`."""
    config = getattr(sub, "ddp_config", None)
    chunks = getattr(sub, "model_chunks", ())
    return (
        any(getattr(config, name, False) for name in _SETTINGS)
        and hasattr(sub, _method(sub))
        and len(chunks) > 0
        and all(hasattr(chunk, name) for chunk in chunks for name in _GATHERERS)
    )


def fill_from_masters(model: list[Any], optimizer: Any) -> None:
    """Make all 16-bit and quantized weights from their masters, as Megatron does after a step.

    Called by all ranks: data-parallel groups exchange absolute maxima, then weights. All masters
    and the extra states of modules, which may hold scales, must be loaded before.

    Args:
        model: model chunks with their DistributedDataParallel wrappers.
    """
    with torch.no_grad():
        for sub in sub_optimizers(optimizer):
            if isinstance(sub, DistributedOptimizer):
                getattr(sub, _method(sub))()
        for chunk in model:
            _gather(chunk)


def _method(sub: Any) -> str:
    # With the shared buffer Megatron gathers 16-bit values, and every rank quantizes all values.
    shared = reuses_gradient_buffer(sub)
    return "_copy_main_params_to_param_buffer" if shared else "_copy_main_params_to_model_params"


def _gather(chunk: Any) -> None:
    """Gather the weights of a chunk from the other replicas and wait for the result."""
    if not chunk.ddp_config.overlap_param_gather:
        chunk.start_param_sync()
        return
    # `start_param_sync(force_sync=True)` is not enough: Megatron copies MXFP8 weights out of the
    # gradient buffer and makes the transposes in `finish_param_sync`.
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group.start_param_sync()
        group.finish_param_sync(skip_next_bucket_dispatch=True)
