"""Extra states for Megatron's own linear layers, as TransformerEngine's layers have for FP8.

Megatron's local layers return None as their extra state, and ignore a loaded one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import unwrap_model

_KEPT = "extra_state_of_tests"


def install() -> None:
    """Make the linear layers of this process keep what `draw` gives them."""
    for layer in (ColumnParallelLinear, RowParallelLinear):
        layer.get_extra_state = lambda self: getattr(self, _KEPT, None)
        layer.set_extra_state = lambda self, state: setattr(self, _KEPT, state)


def draw(model: list[Any], seed: int) -> None:
    """Give the linear layers of all transformer layers states that differ by seed and place."""
    for name, module in _linear(model):
        digits = [seed, *name.encode()]
        setattr(module, _KEPT, torch.tensor(digits, dtype=torch.uint8))


def held(model: list[Any]) -> dict[str, list[int]]:
    """Return the extra states of this rank by names that are equal under all layouts."""
    return {name: getattr(module, _KEPT).tolist() for name, module in _linear(model)}


def _linear(model: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers of the decoder's layers, without experts, whose names are local."""
    for chunk in unwrap_model(model):
        for layer in chunk.decoder.layers:
            for name, module in layer.named_modules():
                is_linear = isinstance(module, ColumnParallelLinear | RowParallelLinear)
                if is_linear and "experts" not in name:
                    yield f"{layer.layer_number}.{name}", module
