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
ChainedOptimizer = _optimizers.ChainedOptimizer
#: Its method that tells which part of a parameter is this rank's; renamed in core 0.6.
RANGE_MAP = ("_get_model_param_range_map", "get_model_param_range_map")
#: Its gradient buffers, which know the parameters of all replicas; renamed in core 0.6.
BUFFERS = ("buffers", "grad_buffers")


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
        """Return the live per-element state tensors by name; empty before the first step.

        Raises:
            UnsupportedError: there is state that is neither that nor a count of steps.
        """
        # `state` is a defaultdict: a plain look-up would leave an empty entry behind, which stops
        # later allocation.
        if self.owned not in self.inner.state:
            return {}
        state = self.inner.state[self.owned]
        found = {name: value for name, value in state.items() if self._is_per_element(value)}
        # Steps are tensors of one element, and kept with the param groups.
        odd = [
            f"'{name}' ({_shape(value)})"
            for name, value in state.items()
            if name not in found
            and value is not None
            and not (name == "step" and isinstance(value, torch.Tensor) and value.numel() == 1)
        ]
        if odd:
            raise UnsupportedError(
                f"optimizer {type(self.inner).__name__} keeps {', '.join(odd)} for a parameter of "
                f"{self.end - self.start} elements: neither one element for each nor a count of "
                "steps, which is all that this release saves; use another optimizer, or keep "
                "Megatron's own checkpointing for this job"
            )
        return found

    def _is_per_element(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.dim() > 0
            and value.numel() == self.end - self.start
        )


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"of shape {tuple(value.shape)}"
    return f"of type {type(value).__name__}"


def sub_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that hold state, chained ones unfolded, in a fixed order.

    Raises:
        UnsupportedError: one of them is of a kind whose state cannot be told apart.
    """
    if optimizer is None:
        return []
    if isinstance(optimizer, ChainedOptimizer):
        _refuse_layer_wise(optimizer)
        return [sub for part in optimizer.chained_optimizers for sub in sub_optimizers(part)]
    if getattr(optimizer, "is_stub_optimizer", False):
        return []
    _refuse_unknown(optimizer)
    return [] if optimizer.optimizer is None else [optimizer]


def _refuse_layer_wise(optimizer: Any) -> None:
    if any(kind.__name__ == "LayerWiseDistributedOptimizer" for kind in type(optimizer).__mro__):
        raise UnsupportedError(
            "LayerWiseDistributedOptimizer (--optimizer dist_muon and the like) gives whole "
            "parameters to single replicas, which this release does not save; use --optimizer muon "
            "or adam, or keep Megatron's own checkpointing for this job"
        )


def _refuse_unknown(optimizer: Any) -> None:
    if not isinstance(
        optimizer, DistributedOptimizer | Float16OptimizerWithFloat16Params | FP32Optimizer
    ):
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} is not one whose state this release saves "
            "(DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer); use one of "
            "them, or keep Megatron's own checkpointing for this job"
        )
    flags = {
        "--use-precision-aware-optimizer": ("config", "use_precision_aware_optimizer"),
        "--optimizer-cpu-offload": ("config", "optimizer_cpu_offload"),
        "--use-megatron-fsdp": ("ddp_config", "use_megatron_fsdp"),
    }
    # No config before core 0.6.
    given = [
        flag
        for flag, (config, name) in flags.items()
        if getattr(getattr(optimizer, config, None), name, False)
    ]
    if given:
        raise UnsupportedError(
            f"{' and '.join(given)}: the optimizer keeps its state in a layout that this release "
            "does not save; start without, or keep Megatron's own checkpointing for this job (with "
            "Megatron-FSDP --ckpt-format fsdp_dtensor)"
        )


def sharded(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters whose state a DistributedOptimizer shards over the replicas.

    Also those of which all is other replicas' part.
    """
    for sub in sub_optimizers(optimizer):
        if isinstance(sub, DistributedOptimizer):
            for buffer in getattr(sub, next(name for name in BUFFERS if hasattr(sub, name))):
                yield from buffer.param_index_map


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
    range_map = getattr(sub, next(name for name in RANGE_MAP if hasattr(sub, name)))
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
