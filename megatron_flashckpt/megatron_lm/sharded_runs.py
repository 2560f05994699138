"""Elements of a local tensor that Megatron's entry of a sharded state dict puts into each box.

Most parameters are one box. A factory (SwiGLU's fused fc1, Mamba's projections) splits one local
tensor into several boxes. To find the elements of each box, the factory is run on a probe tensor
without storage.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.layout.piece import Shape
from megatron_flashckpt.megatron_lm.tensor_geometry import Run

#: A tensor with more runs than the first, which are shorter than the second, is transposed.
_MANY_RUNS, _SHORT_RUN = 1024, 16


def runs_of(entry: ShardedTensor | ShardedTensorFactory) -> tuple[Run, ...]:
    """Return the runs of an entry's tensor; those of a factory in the order of its parts.

    Raises:
        UnsupportedError: hardly two adjacent elements of the tensor stay together.
    """
    if isinstance(entry, ShardedTensorFactory):
        return tuple(_factory_runs(entry))
    return (Run(entry.key, *_box(entry), 0, 0, math.prod(entry.local_shape)),)


def leaves(nest: dict[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield `(key, value)` of all values other than dicts and lists, depth first."""
    for key, value in nest.items() if isinstance(nest, dict) else enumerate(nest):
        if isinstance(value, dict | list):
            yield from leaves(value)
        else:
            yield key, value


def _box(entry: ShardedTensor) -> tuple[Shape, Shape, Shape]:
    """Return global shape, offset and shape; prepended axes have extent 1."""
    shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
    return tuple(entry.global_shape), tuple(entry.global_offset), shape


def _factory_runs(factory: ShardedTensorFactory) -> Iterator[Run]:
    """Yield the runs of a fused tensor, in the order of the factory's parts."""
    local = factory.data
    probe = torch.empty(local.shape, dtype=local.dtype, device="meta")
    parts = _build(factory, probe)
    storage = probe.untyped_storage()._cdata
    if not all(part.data.untyped_storage()._cdata == storage for part in parts):
        # The factory copies, so number the elements and look for the numbers in the parts.
        probe = torch.arange(local.numel(), dtype=torch.int64).view(local.shape)
        parts = _build(factory, probe)
        for part in parts:
            yield from _runs_of_indices(part, part.data.reshape(-1))
        return
    for part in parts:
        view = part.data
        if view.is_contiguous():
            yield Run(part.key, *_box(part), 0, view.storage_offset(), view.numel())
            continue
        indices = torch.arange(local.numel(), dtype=torch.int64)
        yield from _runs_of_indices(
            part, indices.as_strided(view.shape, view.stride(), view.storage_offset()).reshape(-1)
        )


def _build(factory: ShardedTensorFactory, probe: torch.Tensor) -> list[ShardedTensor]:
    built = dataclasses.replace(factory, data=probe).build()
    return [entry for _, entry in leaves({"built": built}) if isinstance(entry, ShardedTensor)]


def _runs_of_indices(part: ShardedTensor, indices: torch.Tensor) -> Iterator[Run]:
    """Yield maximal runs.

    Args:
        indices: index in the local tensor of each element of the box.
    """
    if not indices.numel():
        return
    jumps = torch.nonzero(indices[1:] - indices[:-1] != 1).flatten() + 1
    if len(jumps) > _MANY_RUNS and indices.numel() < _SHORT_RUN * len(jumps):
        raise UnsupportedError(
            f"{part.key}: Megatron stores this tensor transposed (the old grouped GEMM of experts "
            "does), so no two of its elements stay together; start without --moe-grouped-gemm or "
            "with TransformerEngine's grouped experts, or keep Megatron's own checkpointing"
        )
    bounds = jumps.tolist()
    for low, high in zip([0, *bounds], [*bounds, indices.numel()], strict=True):
        yield Run(part.key, *_box(part), low, int(indices[low]), high - low)
