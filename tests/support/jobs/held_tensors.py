"""Tensors that a rank holds, read by Megatron's own accessors: the oracle for the result of a load.

This file uses nothing of megatron_flashckpt. It describes every tensor of the model and of the
optimizer on this rank by its place in the global tensor and a digest of its bytes, duplicates
included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from megatron.core import mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.utils import unwrap_model


def sub_optimizers(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [sub for sub in chained if not getattr(sub, "is_stub_optimizer", False)]


def described(model: list[Any], optimizer: Any) -> Iterator[list[Any]]:
    """Yield `[kind, key, global shape, offset, shape, start, end, digest]` of every local part.

    `[start, end)` is a range of the row-major flattening of the box.
    """
    by_id = _sharded(model)
    parameters = {id(weight) for chunk in unwrap_model(model) for weight in chunk.parameters()}
    for number, entry in by_id.items():
        kind = "weight" if number in parameters else "buffer"
        flat = entry.data.detach().reshape(-1)
        yield from _parts(kind, entry, 0, flat.numel(), flat)
    for parameter, start, end, owned, states in stepped(optimizer):
        # The optimizer steps a 32-bit weight itself.
        stepped_kind = "weight" if parameter.dtype == torch.float32 else "master"
        for kind, tensor in {stepped_kind: owned, **states}.items():
            flat = tensor.detach().reshape(-1)
            yield from _parts(kind, by_id[id(parameter)], start, end, flat)


def _sharded(model: list[Any]) -> dict[int, Any]:
    """Return Megatron's description of each tensor of the model, by the id of the tensor."""
    metadata = {
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    by_id: dict[int, Any] = {}
    for chunk in unwrap_model(model):
        for entry in nested_values(chunk.sharded_state_dict(metadata=metadata)):
            if isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data is not None:
                by_id.setdefault(id(entry.data), entry)
    return by_id


def settings(model: list[Any], optimizer: Any) -> tuple[dict[str, list[Any]], list[Any]]:
    """Return the settings of every parameter by its key, and those of groups without parameters.

    Settings are all entries of a param group except parameters and steps. Only under expert
    parallelism do expert parameters have groups of their own, so that mark is left out.
    """
    by_id = _sharded(model)
    by_key: dict[str, list[Any]] = {}
    of_empty = []
    for sub in sub_optimizers(optimizer):
        if isinstance(sub, DistributedOptimizer):
            members = zip(sub.model_float16_groups, sub.model_fp32_groups, strict=True)
        elif isinstance(sub, FP32Optimizer):
            members = ((group["params"], []) for group in sub.optimizer.param_groups)
        else:
            members = zip(sub.float16_groups, sub.fp32_from_fp32_groups, strict=True)
        for group, (half, full) in zip(sub.optimizer.param_groups, members, strict=True):
            kept = group.keys() - {"params", "step", "is_expert_parallel"}
            values = {name: group[name] for name in sorted(kept)}
            if not (half or full):
                of_empty.append(values)
            for parameter in (*half, *full):
                of_key = by_key.setdefault(by_id[id(parameter)].key, [])
                if values not in of_key:  # all layers have one key
                    of_key.append(values)
    return by_key, of_empty


def stepped(optimizer: Any) -> Iterator[tuple[Any, int, int, Any, dict[str, torch.Tensor]]]:
    """Yield `(parameter, start, end, owned, states)` for each range that this rank steps.

    `owned` is the tensor that the optimizer steps. Megatron's own accessor of the distributed
    optimizer mixes parameters up if one group has several types.
    """
    for sub in sub_optimizers(optimizer):
        if isinstance(sub, DistributedOptimizer):
            pairs = [
                *zip(sub.model_float16_groups, sub.shard_fp32_from_float16_groups, strict=True),
                *zip(sub.model_fp32_groups, sub.shard_fp32_groups, strict=True),
            ]
        elif isinstance(sub, FP32Optimizer):
            pairs = [(group["params"],) * 2 for group in sub.optimizer.param_groups]
        else:
            pairs = [
                *zip(sub.float16_groups, sub.fp32_from_float16_groups, strict=True),
                *((group, group) for group in sub.fp32_from_fp32_groups),
            ]
        for parameter, owned in (pair for group in pairs for pair in zip(*group, strict=True)):
            start, end = 0, parameter.numel()
            if isinstance(sub, DistributedOptimizer):
                extent = sub._get_model_param_range_map(parameter)["param"]
                start, end = extent.start, extent.end
            states = sub.optimizer.state[owned]
            tensors = {kind: value for kind, value in states.items() if kind != "step"}
            yield parameter, start, end, owned, tensors


def _parts(
    kind: str, entry: ShardedTensor | ShardedTensorFactory, start: int, end: int, flat: torch.Tensor
) -> Iterator[list[Any]]:
    """Yield the parts of `flat`, the local range `[start, end)`; every part lies in one box."""
    index = torch.arange(entry.data.numel()).view(entry.data.shape)
    boxes = [(entry, index)]
    if isinstance(entry, ShardedTensorFactory):
        built = dataclasses.replace(entry, data=index).build()
        boxes = [(box, box.data) for box in nested_values({"built": built})]
    for box, indices in boxes:
        indices = indices.reshape(-1)
        inside = torch.nonzero((indices >= start) & (indices < end)).flatten()
        if not inside.numel():
            continue
        low, high = int(inside[0]), int(inside[-1]) + 1
        assert high - low == inside.numel(), f"{box.key}: not one range of its box"
        content = flat[indices[low:high] - start]
        yield [
            kind,
            box.key,
            list(box.global_shape),
            list(box.global_offset),
            [1] * box.prepend_axis_num + list(box.local_shape),
            low,
            high,
            digest(content),
        ]


def digest(content: torch.Tensor) -> str:
    """Return a digest of the bytes of a contiguous tensor."""
    return xxhash.xxh3_64_hexdigest(content.contiguous().view(torch.uint8).numpy())


def steps(optimizer: Any) -> list[float]:
    """Return the distinct step counts of the optimizers."""
    counts = set()
    for sub in sub_optimizers(optimizer):
        inner = sub.optimizer
        counts |= {float(group["step"]) for group in inner.param_groups if "step" in group}
        counts |= {float(state["step"]) for state in inner.state.values() if "step" in state}
    return sorted(counts)


def scalers(optimizer: Any) -> list[Any]:
    """Return the states of the optimizers' loss scalers."""
    all_scalers = [getattr(sub, "grad_scaler", None) for sub in sub_optimizers(optimizer)]
    states = [scaler.state_dict() for scaler in all_scalers if scaler is not None]
    return [{name: float(value) for name, value in sorted(state.items())} for state in states]
