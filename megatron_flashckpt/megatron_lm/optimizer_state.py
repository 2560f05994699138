"""Tensors of the optimizer, with the part of each parameter that they cover.

The tensors are read from the optimizer's own tables; nothing is gathered. A `DistributedOptimizer`
is read through its group lists (`model_float16_groups` zipped with
`shard_fp32_from_float16_groups`, and the fp32 pair). Its `model_param_group_index_map` is not used,
because it is wrong for groups that mix fp32 and 16-bit parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.layout.piece import MASTER
from megatron_flashckpt.megatron_lm.cpu_offload import is_offloading, steppers
from megatron_flashckpt.megatron_lm.old_releases import (
    config_of,
    gathers_into_buffer,
    gradient_buffers,
    optimizer_module,
    range_map,
)

_optimizers = optimizer_module("optimizer")
DistributedOptimizer = optimizer_module("distrib_optimizer").DistributedOptimizer
Float16OptimizerWithFloat16Params = _optimizers.Float16OptimizerWithFloat16Params
FP32Optimizer = _optimizers.FP32Optimizer
ChainedOptimizer = _optimizers.ChainedOptimizer

#: Name of the fp32 master among the states of precision-aware optimizers.
MASTER_STATE = "master_param"
#: Types of their states without a scale. States of other types need a scale, which is not saved.
_UNSCALED = (torch.float32, torch.bfloat16)


class OptimizerEntry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Tensors that one optimizer holds for one model parameter on this rank."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    """The half-open range of the flattened local parameter that this rank's optimizer owns."""
    owned: torch.Tensor
    """Tensor of `end - start` elements that the inner optimizer steps; key of its state."""
    is_master: bool
    """True if `owned` is an fp32 copy; False if it is the weight itself."""
    inner: torch.optim.Optimizer
    sharded: bool
    """True if other replicas own the other ranges; False if every replica owns all of it."""
    main: bool
    """False on the duplicates of a DistributedOptimizer with several instances."""
    stale_weight: bool = False
    """True if the parameter may be older than `owned` until the next forward pass."""
    keeps_master: bool = False
    """True if the inner optimizer has the master among its states (precision-aware optimizers)."""

    def states(self) -> dict[str, torch.Tensor]:
        """Return the live per-element state tensors by kind; empty before the first step.

        Raises:
            UnsupportedError: there is state other than per-element tensors and step counts.
        """
        # `state` is a defaultdict: indexing would leave an empty entry, which prevents a later
        # allocation.
        state = self.inner.state.get(self.owned, {})
        numel = self.end - self.start
        states, unsupported = {}, []
        for name, value in state.items():
            if value is None or value is self.owned:  # offloaded tensors list themselves as state
                continue
            is_tensor = isinstance(value, torch.Tensor)
            # Step counts are tensors of one element and are saved with the param groups.
            if is_tensor and name == "step" and value.numel() == 1:
                continue
            # A tensor without axes is a number per parameter, except if the parameter has no axes.
            if is_tensor and value.numel() == numel and (value.dim() > 0 or self.owned.dim() == 0):
                states[kind_of(name, value.dtype)] = value
            else:
                unsupported.append(f"'{name}' ({_shape(value)})")
        if unsupported:
            raise UnsupportedError(
                f"optimizer {type(self.inner).__name__} keeps {', '.join(unsupported)} for a "
                f"parameter of {numel} elements: neither one element for each nor a count of "
                "steps, which is all that this release saves; use another optimizer, or keep "
                "Megatron's own checkpointing for this job"
            )
        return states

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live per-element tensors other than the weight, by kind."""
        return {MASTER: self.owned, **self.states()} if self.is_master else self.states()

    @property
    def family(self) -> str:
        """Class name of the inner optimizer; a family has states of one set of kinds."""
        return type(self.inner).__name__


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"of shape {tuple(value.shape)}"
    return f"of type {type(value).__name__}"


def kind_of(name: str, dtype: torch.dtype) -> str:
    """Return the kind of the pieces of a state."""
    # TransformerEngine may store, as integers, only the bits of a master that the weight lacks.
    return MASTER if name == MASTER_STATE and dtype == torch.float32 else name


def sub_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that hold state, chained ones unfolded, in a fixed order.

    Raises:
        UnsupportedError: this release does not know the state of one of these classes.
    """
    return [sub for sub, _ in parts(optimizer)]


def parts(optimizer: Any, assigned: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield the optimizers that hold state, and whether parameters are assigned to replicas.

    Layer-wise optimizers assign every parameter completely to one replica, whose optimizer lists
    only its own parameters.
    """
    if optimizer is None:
        return
    if isinstance(optimizer, ChainedOptimizer):
        assigned = any(
            kind.__name__ == "LayerWiseDistributedOptimizer" for kind in type(optimizer).mro()
        )
        for part in optimizer.chained_optimizers:
            yield from parts(part, assigned)
    elif not getattr(optimizer, "is_stub_optimizer", False):
        _refuse_unknown(optimizer)
        if optimizer.optimizer is not None:
            yield optimizer, assigned


def _refuse_unknown(optimizer: Any) -> None:
    if not isinstance(
        optimizer, DistributedOptimizer | Float16OptimizerWithFloat16Params | FP32Optimizer
    ):
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} is not one whose state this release saves "
            "(DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer); use one of "
            "them, or keep Megatron's own checkpointing for this job"
        )
    if getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False):
        raise UnsupportedError(
            "--use-megatron-fsdp: the optimizer keeps its state in a layout that this release does "
            "not save; keep Megatron's own checkpointing (--ckpt-format fsdp_dtensor) for this job"
        )
    config = config_of(optimizer)
    if not getattr(config, "use_precision_aware_optimizer", False):
        return
    given = {
        name: getattr(config, name)
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    }
    scaled = {name: dtype for name, dtype in given.items() if dtype not in _UNSCALED}
    if scaled:
        flags = ", ".join(f"--{name.replace('_', '-')} {dtype}" for name, dtype in scaled.items())
        raise UnsupportedError(
            f"{flags}: states of this type come with scales that this release does not save; "
            "use fp32 or bf16, or keep Megatron's own checkpointing for this job"
        )


def sharded(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters whose state is sharded over replicas or assigned to one replica.

    Includes parameters whose optimizer state lies entirely on other replicas.
    """
    for sub, assigned in parts(optimizer):
        if isinstance(sub, DistributedOptimizer):
            for buffer in gradient_buffers(sub):
                yield from buffer.param_index_map
        elif assigned:
            yield from (entry.parameter for entry in entries(sub))
    yield from assigned_parameters(optimizer)


def assigned_parameters(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters that a layer-wise optimizer has assigned to any replica.

    With one replica the optimizer has no such lists, so nothing is yielded.
    """
    for name in ("dp_cp_params_list", "expt_dp_params_list"):
        for of_replica in getattr(optimizer, name, None) or ():
            yield from of_replica
    for part in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else ():
        yield from assigned_parameters(part)


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers that step the tensors."""
    return [sub.optimizer for sub in sub_optimizers(optimizer)]


def group_members(sub: Any) -> Iterator[tuple[Sequence[torch.nn.Parameter], ...]]:
    """Yield the model's parameters of each param group of `sub`, as one list or two.

    Args:
        sub: one of `sub_optimizers`.
    """
    if isinstance(sub, DistributedOptimizer):
        yield from zip(sub.model_float16_groups, sub.model_fp32_groups, strict=True)
    elif isinstance(sub, Float16OptimizerWithFloat16Params):
        yield from zip(sub.float16_groups, sub.fp32_from_fp32_groups, strict=True)
    else:
        for group in sub.optimizer.param_groups:
            yield (group["params"],)


def entries(optimizer: Any) -> Iterator[OptimizerEntry]:
    """Yield the entries of `optimizer` (chained or not) for all parameters on this rank."""
    for sub, assigned in parts(optimizer):
        yield from entries_of(sub, assigned=assigned)


def entries_of(sub: Any, *, assigned: bool) -> Iterator[OptimizerEntry]:
    """Yield the entries of `sub` for all parameters on this rank.

    Args:
        sub: one of the optimizers from `parts`.
        assigned: second value from `parts`.
    """
    if isinstance(sub, DistributedOptimizer):
        yield from _distributed(sub)
    elif isinstance(sub, Float16OptimizerWithFloat16Params):
        for models, masters in zip(sub.float16_groups, sub.fp32_from_float16_groups, strict=True):
            for model, master in zip(models, masters, strict=True):
                yield OptimizerEntry(
                    model, 0, model.numel(), master, True, sub.optimizer, assigned, True
                )
        for models in sub.fp32_from_fp32_groups:
            yield from _in_place(models, sub, assigned)
    else:
        for group in sub.optimizer.param_groups:
            yield from _in_place(group["params"], sub, assigned)


def _in_place(parameters: list[Any], sub: Any, assigned: bool) -> Iterator[OptimizerEntry]:
    for model in parameters:
        yield OptimizerEntry(model, 0, model.numel(), model, False, sub.optimizer, assigned, True)


def _distributed(sub: Any) -> Iterator[OptimizerEntry]:
    range_of = range_map(sub)
    main = getattr(sub, "distributed_optimizer_instance_id", 0) == 0
    stale = weights_lag(sub)
    aware = _is_precision_aware(sub)
    offloaded = steppers(sub.optimizer) if is_offloading(sub.optimizer) else {}
    for models, owned, are_masters in shard_groups(sub):
        for model, shard in zip(models, owned, strict=True):
            extent = range_of(model)["param"]
            place = (model, extent.start, extent.end)
            if offloaded:
                stepped = sub.optimizer.param_to_inner_param[shard]
                copied = stepped is not shard
                yield OptimizerEntry(*place, stepped, copied, offloaded[id(stepped)], True, main)
            else:
                yield OptimizerEntry(
                    *(*place, shard, are_masters, sub.optimizer, True, main),
                    stale_weight=are_masters and stale,
                    keeps_master=aware,
                )


def shard_groups(
    sub: Any,
) -> Iterator[tuple[list[torch.nn.Parameter], list[torch.Tensor], bool]]:
    """Yield `(parameters, shards, are masters)` for the parameters that this rank owns parts of.

    The shards are the tensors of these parts in the tables of the DistributedOptimizer. They are
    masters if they have storages of their own.
    """
    aware = _is_precision_aware(sub)
    halves = sub.shard_float16_groups if aware else sub.shard_fp32_from_float16_groups
    for models, shards in zip(sub.model_float16_groups, halves, strict=True):
        yield models, shards, not aware
    for models, shards in zip(sub.model_fp32_groups, sub.shard_fp32_groups, strict=True):
        yield models, shards, False


def weights_lag(sub: Any) -> bool:
    """Return whether weights may be older than their masters until the next forward pass.

    With MXFP8 weights in the gradient buffer, the next forward pass copies the masters.
    """
    if gathers_into_buffer(sub):
        return True
    overlaps = bool(getattr(config_of(sub), "overlap_param_gather", False))
    return reuses_gradient_buffer(sub) and overlaps


def keeps_masters(sub: Any) -> bool:
    """Return whether `sub` is a DistributedOptimizer that keeps fp32 masters on the device.

    Precision-aware optimizers keep masters in their state, offloading optimizers in host memory.
    """
    return (
        isinstance(sub, DistributedOptimizer)
        and not _is_precision_aware(sub)
        and not is_offloading(sub.optimizer)
    )


def reuses_gradient_buffer(sub: Any) -> bool:
    """Return whether Megatron gathers (MXFP8) weights in the gradient buffer."""
    return bool(getattr(config_of(sub), "reuse_grad_buf_for_mxfp8_param_ag", False))


def _is_precision_aware(sub: Any) -> bool:
    """Return whether the inner optimizer steps 16-bit weights and keeps their masters itself."""
    config = config_of(sub)
    aware = getattr(config, "use_precision_aware_optimizer", False)
    # Since core 0.13 the answer also depends on the FP8 recipe.
    return bool(getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", aware))


def allocate(entry: OptimizerEntry, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Return the tensors that a load fills other than the weight, by kind; allocate missing ones.

    Args:
        dtypes: types of the states that the checkpoint has for this family, by kind.
    """
    if entry.keeps_master and entry.owned not in entry.inner.state:
        _initialize(entry)
    tensors = entry.tensors()
    state = entry.inner.state[entry.owned]
    for kind, dtype in dtypes.items():
        if kind not in tensors and kind not in (MASTER, MASTER_STATE):
            # Zeros as in a new optimizer: harmless if the load is refused afterwards.
            tensors[kind] = state[kind] = torch.zeros_like(
                entry.owned, dtype=dtype, requires_grad=False
            )
    kinds = (*dtypes, MASTER, MASTER_STATE)
    return {kind: tensor for kind, tensor in tensors.items() if kind in kinds}


def _initialize(entry: OptimizerEntry) -> None:
    """Make a precision-aware optimizer create its states, which may include more than tensors."""
    inner: Any = entry.inner
    initialize = inner.initialize_state
    if "store_param_remainders" in inspect.signature(initialize).parameters:  # since TE 2.1
        remainders = inner.store_param_remainders and entry.owned.dtype == torch.bfloat16
        initialize(entry.owned, remainders)
    else:
        initialize(entry.owned)


def is_expert(parameter: torch.nn.Parameter) -> bool:
    """Return whether the parameter is replicated over the expert-data-parallel group."""
    return not getattr(parameter, "allreduce", True)
