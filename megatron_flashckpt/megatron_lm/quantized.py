"""FP8 and FP4 weights: parameters of tensor classes that run every operator themselves.

TransformerEngine's `QuantizedTensor` has a nominal 16-bit dtype and keeps its bytes elsewhere. A
slice of it is a dequantized copy: a save that took slices would store other values than training
uses, and a load that filled slices would lose what it filled. So saves leave such weights to their
fp32 masters, and loads have Megatron quantize the masters again (`requantization`).
"""

from __future__ import annotations

import importlib

import torch

from megatron_flashckpt.megatron_lm.features import exists

#: Modules of megatron.core, each with its function that recognizes the classes it can quantize.
_RECOGNIZERS = {"fp8_utils": "is_float8tensor", "fp4_utils": "is_nvfp4tensor"}


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether the class of `tensor` runs operators itself, as wrappers of other bytes do.

    Classes that change nothing about a tensor's memory, such as `torch.nn.Parameter`, do not.
    """
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_known_to_megatron(tensor: torch.Tensor) -> bool:
    """Return whether Megatron quantizes masters into tensors of this class."""
    for module, recognizer in _RECOGNIZERS.items():
        home = f"megatron.core.{module}"
        if exists(home) and getattr(importlib.import_module(home), recognizer)(tensor):
            return True
    return False
