"""Recognizes FP8 and FP4 weights: parameters of tensor classes that run every operator themselves.

TransformerEngine's `QuantizedTensor` has a nominal 16-bit dtype and stores its bytes in other
tensors. A slice of such a weight is a dequantized copy: a save would store other values than
training uses, and a load into a slice would change nothing. So a save stores only the fp32 masters,
and after a load Megatron quantizes the masters again (`requantization`).
"""

from __future__ import annotations

import importlib

import torch

from megatron_flashckpt.megatron_lm.compat import exists

#: Modules of megatron.core and their functions that recognize classes Megatron can quantize into.
_RECOGNIZERS = {"fp8_utils": "is_float8tensor", "fp4_utils": "is_nvfp4tensor"}


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
