"""Model parameters that each param group of an optimizer holds on this rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.optimizer_state import (
    DistributedOptimizer,
    Float16OptimizerWithFloat16Params,
)


def held_keys(sub: Any, geometry: ModelGeometry) -> list[list[str]]:
    """Return, by group, the global keys of the parameters that the group steps on this rank.

    A parameter counts even if this rank steps only a part of it. All layers share a key, so a group
    has few keys, independent of the model's size.

    Args:
        sub: one of `optimizer_state.sub_optimizers`.
    """
    members = [tuple(of_group) for of_group in _members(sub)]
    signature = tuple(map(len, itertools.chain(*members)))
    known = geometry.keys_of_groups.get(sub)
    if known is None or known[0] != signature:
        keys = {id(parameter): geo.runs[0].key for parameter, geo in geometry.parameters}
        held = [
            sorted({keys[id(p)] for p in itertools.chain(*of_group) if id(p) in keys})
            for of_group in members
        ]
        # A later save walks over all parameters again only if the groups have changed.
        known = geometry.keys_of_groups[sub] = (signature, held)
    return known[1]


def _members(sub: Any) -> Iterator[Sequence[Sequence[torch.nn.Parameter]]]:
    """Yield the model's parameters of each group, as one list or two."""
    if isinstance(sub, DistributedOptimizer):
        yield from zip(sub.model_float16_groups, sub.model_fp32_groups, strict=True)
    elif isinstance(sub, Float16OptimizerWithFloat16Params):
        yield from zip(sub.float16_groups, sub.fp32_from_fp32_groups, strict=True)
    else:
        for group in sub.optimizer.param_groups:
            yield (group["params"],)
