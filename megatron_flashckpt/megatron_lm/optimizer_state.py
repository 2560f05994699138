"""The optimizer's tensors, with the part of each parameter that they cover.

Read from the optimizer's own tables; nothing is gathered. `DistributedOptimizer` is walked through
its group lists (`model_float16_groups` zipped with `shard_fp32_from_float16_groups`, and the fp32
pair), never through `model_param_group_index_map`: that one is wrong for groups which mix fp32 and
16-bit parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm.stock import OPTIMIZER_HOMES, stock_module

_optimizers = stock_module("optimizer.optimizer", OPTIMIZER_HOMES)
DistributedOptimizer = stock_module(
    "optimizer.distrib_optimizer", OPTIMIZER_HOMES
).DistributedOptimizer
Float16OptimizerWithFloat16Params = _optimizers.Float16OptimizerWithFloat16Params
FP32Optimizer = _optimizers.FP32Optimizer


@dataclasses.dataclass(frozen=True)
class OptimizerEntry:
    """What one optimizer holds for one model parameter on this rank."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    """The half-open range of the flattened local parameter that this rank's optimizer owns."""
    owned: torch.Tensor
    """The tensor that the inner optimizer steps, `end - start` elements: its state's key."""
    is_master: bool
    """Whether `owned` is an fp32 copy (else it is the weight itself)."""
    inner: torch.optim.Optimizer
    sharded: bool
    """Whether other replicas own the other ranges (else every replica has all of it)."""
    main: bool
    """False on the duplicates of a DistributedOptimizer with several instances."""
    stale_weight: bool = False
    """Whether the parameter itself may lag behind `owned` until the next forward."""

    def states(self) -> dict[str, torch.Tensor]:
        """Return the live per-element state tensors by name; empty before the first step."""
        # `state` is a defaultdict: a plain look-up would leave an empty entry behind, which stops
        # later allocation.
        if self.owned not in self.inner.state:
            return {}
        return {
            name: value
            for name, value in self.inner.state[self.owned].items()
            if isinstance(value, torch.Tensor)
            and value.dim() > 0
            and value.numel() == self.end - self.start
        }


def sub_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that hold state, chained ones unfolded, in a fixed order.

    Raises:
        UnsupportedError: one of them is of a kind whose state cannot be told apart.
    """
    if optimizer is None:
        return []
    if hasattr(optimizer, "chained_optimizers") and not isinstance(
        optimizer, DistributedOptimizer | Float16OptimizerWithFloat16Params | FP32Optimizer
    ):
        return [sub for part in optimizer.chained_optimizers for sub in sub_optimizers(part)]
    if getattr(optimizer, "is_stub_optimizer", False):
        return []
    _refuse_unknown(optimizer)
    return [] if optimizer.optimizer is None else [optimizer]


def _refuse_unknown(optimizer: Any) -> None:
    config = getattr(optimizer, "config", None)  # none before core 0.6
    for flag, remedy in (
        ("use_precision_aware_optimizer", "--use-precision-aware-optimizer"),
        ("optimizer_cpu_offload", "--optimizer-cpu-offload"),
    ):
        if getattr(config, flag, False):
            raise UnsupportedError(
                f"{remedy} keeps optimizer state in a layout that this release does not save; "
                "start without it, or keep Megatron's own checkpointing for this job"
            )
    if getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False):
        raise UnsupportedError(
            "--use-megatron-fsdp shards parameters itself, which this release does not save; "
            "keep Megatron's own checkpointing (--ckpt-format fsdp_dtensor) for this job"
        )
    known = DistributedOptimizer | Float16OptimizerWithFloat16Params | FP32Optimizer
    if not isinstance(optimizer, known):
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} is not one whose state this release saves "
            "(DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)"
        )


def has_distributed(optimizer: Any) -> bool:
    """Return whether a DistributedOptimizer shards state over the replicas."""
    return any(isinstance(sub, DistributedOptimizer) for sub in sub_optimizers(optimizer))


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers whose steps change the state."""
    return [sub.optimizer for sub in sub_optimizers(optimizer)]


def entries(optimizer: Any) -> Iterator[OptimizerEntry]:
    """Yield what `optimizer` (chained or not) holds for every parameter on this rank."""
    for sub in sub_optimizers(optimizer):
        if isinstance(sub, DistributedOptimizer):
            yield from _distributed(sub)
        elif isinstance(sub, Float16OptimizerWithFloat16Params):
            for models, masters in zip(
                sub.float16_groups, sub.fp32_from_float16_groups, strict=True
            ):
                for model, master in zip(models, masters, strict=True):
                    yield OptimizerEntry(
                        model, 0, model.numel(), master, True, sub.optimizer, False, True
                    )
            for models in sub.fp32_from_fp32_groups:
                yield from _in_place(models, sub)
        else:
            for group in sub.optimizer.param_groups:
                yield from _in_place(group["params"], sub)


def _in_place(parameters: list[Any], sub: Any) -> Iterator[OptimizerEntry]:
    for model in parameters:
        yield OptimizerEntry(model, 0, model.numel(), model, False, sub.optimizer, False, True)


def _distributed(sub: Any) -> Iterator[OptimizerEntry]:
    range_map = getattr(sub, "_get_model_param_range_map", None) or sub.get_model_param_range_map
    main = getattr(sub, "distributed_optimizer_instance_id", 0) == 0
    # Before core 0.7 an overlapped all-gather lands in a buffer beside the parameters, even on the
    # rank that owns a range; the next forward copies it over.
    stale = getattr(sub, "overlap_param_gather", False) and hasattr(sub, "param_buffer_copied")
    for is_master, model_groups, shard_groups in (
        (True, sub.model_float16_groups, sub.shard_fp32_from_float16_groups),
        (False, sub.model_fp32_groups, sub.shard_fp32_groups),
    ):
        for models, shards in zip(model_groups, shard_groups, strict=True):
            for model, shard in zip(models, shards, strict=True):
                extent = range_map(model)["param"]
                owner = (sub.optimizer, True, main, is_master and stale)
                yield OptimizerEntry(model, extent.start, extent.end, shard, is_master, *owner)


def allocate(entry: OptimizerEntry, dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Return the state tensors named in `dtypes`, allocated in the optimizer where missing."""
    state = entry.inner.state[entry.owned]
    for name, dtype in dtypes.items():
        if not isinstance(state.get(name), torch.Tensor):
            # Zeros, as a fresh optimizer has them: harmless if the load then refuses.
            state[name] = torch.zeros_like(entry.owned, dtype=dtype, requires_grad=False)
    return {name: state[name] for name in dtypes}


def is_expert(parameter: torch.nn.Parameter) -> bool:
    """Return whether the parameter is replicated over the expert-data-parallel group."""
    return not getattr(parameter, "allreduce", True)
