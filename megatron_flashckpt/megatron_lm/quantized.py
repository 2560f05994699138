"""FP8 and FP4 weights: parameters of tensor classes that run every operator themselves.

TransformerEngine's `QuantizedTensor` has a nominal 16-bit dtype and keeps its bytes elsewhere. A
slice of it is a dequantized copy, so a save would store other bytes than those that training uses,
and what a load writes into a slice is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

#: Megatron's arguments that make such weights.
_FLAGS = ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether the class of `tensor` runs operators itself, as wrappers of other bytes do.

    Classes that change nothing about a tensor's memory, such as `torch.nn.Parameter`, do not.
    """
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def unsupported(args: Any, chunks: list[Any]) -> Iterator[str]:
    """Yield one line per flag and per class of parameters that keep this job from being saved."""
    for flag in _FLAGS:
        if getattr(args, flag, False):
            yield (
                f"--{flag.replace('_', '-')}: weights that are kept in FP8 or FP4 cannot be saved "
                "by this release; start without this flag"
            )
    names: dict[str, list[str]] = defaultdict(list)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if is_quantized(parameter):
                names[type(parameter).__name__].append(name)
    for kind, of_kind in names.items():
        yield (
            f"parameters of type {kind}, whose bytes this release cannot save: "
            f"{', '.join(of_kind)}; start without --fp8-param-gather, --fp4-param-gather and "
            "whatever else quantizes weights"
        )
