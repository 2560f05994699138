"""Recognizes FP8 and FP4 weights: parameters of tensor classes that run every operator themselves.

TransformerEngine's `QuantizedTensor` has a nominal 16-bit dtype and keeps its bytes elsewhere. A
slice of it is a dequantized copy: a save of slices would store other values than training uses, and
a load into slices would change nothing. So saves store only the fp32 masters of such weights, and
loads have Megatron quantize the masters again (`requantization`).
"""

from __future__ import annotations

import importlib

import torch

from megatron_flashckpt.megatron_lm.compat import exists

#: Modules of megatron.core, and the function of each that recognizes classes it can quantize into.
_RECOGNIZERS = {"fp8_utils": "is_float8tensor", "fp4_utils": "is_nvfp4tensor"}


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether the class of `tensor` runs operators itself, because its bytes lie elsewhere.

    `torch.nn.Parameter` and other classes without a memory of their own do not.
    """
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_known_to_megatron(tensor: torch.Tensor) -> bool:
    """Return whether Megatron quantizes masters into tensors of this class."""
    for module, recognizer in _RECOGNIZERS.items():
        home = f"megatron.core.{module}"
        if exists(home) and getattr(importlib.import_module(home), recognizer)(tensor):
            return True
    return False
