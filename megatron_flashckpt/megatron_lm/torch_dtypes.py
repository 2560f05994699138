"""Torch element types and their safetensors names."""

from __future__ import annotations

import torch

from megatron_flashckpt.errors import LayoutError

_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
#: Types of weights that have fp32 masters in the optimizer.
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of `dtype`."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise LayoutError(f"{dtype} cannot be stored; known: {', '.join(_DTYPES)}") from None


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type with the safetensors name `name`."""
    return _DTYPES[name]
