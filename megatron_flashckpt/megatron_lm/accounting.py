"""Checks that a save covers each element that training changes on this rank exactly once.

The optimizer's lists are read under attribute names that Megatron may change, and a tensor outside
these lists would be missing from every checkpoint. So the lists are compared with three independent
sources: the parameters that require gradients, the tensors that the inner optimizer steps, and the
gradient buffers. The check copies no tensor and communicates nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_flashckpt.errors import UnsupportedError, first_few
from megatron_flashckpt.megatron_lm import optimizer_state
from megatron_flashckpt.megatron_lm.cpu_offload import below
from megatron_flashckpt.megatron_lm.old_releases import BUFFER_NAMES, RANGE_MAP_NAMES
from megatron_flashckpt.megatron_lm.optimizer_state import (
    ChainedOptimizer,
    DistributedOptimizer,
    Float16OptimizerWithFloat16Params,
    OptimizerEntry,
    keeps_masters,
)
from megatron_flashckpt.megatron_lm.quantized import (
    is_known_to_megatron,
    is_quantized,
    quantizes_masters,
)
from megatron_flashckpt.megatron_lm.size_estimate import future_states

#: Attributes that are read from each class of optimizer; one name of each tuple must exist.
_ATTRIBUTES: tuple[tuple[type, tuple[tuple[str, ...], ...]], ...] = (
    (
        DistributedOptimizer,
        (
            *(("model_float16_groups",), ("shard_fp32_from_float16_groups",)),
            *(("model_fp32_groups",), ("shard_fp32_groups",)),
            *(RANGE_MAP_NAMES, ("gbuf_ranges",), BUFFER_NAMES, ("grad_scaler",)),
        ),
    ),
    (
        Float16OptimizerWithFloat16Params,
        (
            *(("float16_groups",), ("fp32_from_float16_groups",), ("fp32_from_fp32_groups",)),
            ("grad_scaler",),
        ),
    ),
)
#: Maximum number of parameters that one message names.
_MOST_NAMES = 20


def unaccounted(chunks: list[Any], optimizer: Any) -> list[str]:
    """Return one line per defect in how `optimizer` covers the unwrapped model `chunks`.

    Checks this rank only; `startup` checks that all ranks together cover every parameter.
    """
    if optimizer is None:
        return []
    try:
        if defects := list(_broken_chain(optimizer)):
            return defects
        subs = optimizer_state.sub_optimizers(optimizer)
        if defects := [line for sub in subs for line in _missing_attributes(sub)]:
            return defects
        entries = [(sub, list(optimizer_state.entries(sub))) for sub in subs]
        for entry in (entry for _, of_sub in entries for entry in of_sub):
            entry.states()
    except UnsupportedError as error:
        return [str(error)]
    names = _names(chunks)
    for sub, of_sub in entries:
        defects += _wrong_entries(sub, of_sub, names)
    elsewhere = {id(parameter) for parameter in optimizer_state.assigned_parameters(optimizer)}
    return defects + list(_wrong_parameters(chunks, entries, names, elsewhere))


def has_states(optimizer: Any) -> bool:
    """Return whether the optimizer has made its state, if it makes any; the first step makes it.

    Normally looks at one entry of thousands: a loss scaler may skip many steps, and the caller asks
    after each of them.

    Raises:
        UnsupportedError: an optimizer of this class cannot be saved.
    """
    inner = optimizer_state.inner_optimizers(optimizer)
    steppers = [stepper for top in inner for stepper in below(top)]
    if any(stepper.state for stepper in steppers) and any(
        entry.states() for entry in optimizer_state.entries(optimizer)
    ):
        return True
    # SGD without momentum makes none.
    futures = (future_states(entry) for entry in optimizer_state.entries(optimizer))
    return next(itertools.chain.from_iterable(futures), None) is None


def underivable(chunks: list[Any], optimizer: Any, derivable: set[int], reason: str) -> list[str]:
    """Return a line for each reason why a load could not derive weights from their masters.

    Checks this rank only: rounds its masters and compares the results with the weights.

    Args:
        derivable: ids of the 16-bit parameters that are saved as masters only.
        reason: why these weights are not saved themselves; every line begins with this text.
    """
    names = _names(chunks)
    sharded = {id(parameter) for parameter in optimizer_state.sharded(optimizer)}
    entries = [
        entry
        for entry in optimizer_state.entries(optimizer)
        if entry.sharded and id(entry.parameter) in derivable
    ]
    return [
        *_line(
            f"{reason}, but no optimizer that shards its state steps",
            (name for key, name in names.items() if key in derivable - sharded),
        ),
        *_line(
            f"{reason}, but the optimizer has no fp32 master of",
            (_name(entry.parameter, names) for entry in entries if not _has_master(entry)),
        ),
        *_line(
            f"{reason}, but the weight differs from the rounded master of",
            (
                _name(entry.parameter, names)
                for entry in entries
                if _has_master(entry) and not entry.stale_weight and not _is_rounded_master(entry)
            ),
        ),
    ]


def unquantizable(chunks: list[Any], optimizer: Any) -> list[str]:
    """Return a line for each reason why FP8 or FP4 weights cannot be made from fp32 masters.

    Checks this rank only.

    Args:
        optimizer: the optimizer that is saved or loaded; None if only weights are.

    Raises:
        UnsupportedError: an optimizer of this class cannot be saved.
    """
    quantized = [
        parameter for chunk in chunks for parameter in chunk.parameters() if is_quantized(parameter)
    ]
    if not quantized:
        return []
    names = _names(chunks)
    subs = [sub for sub in optimizer_state.sub_optimizers(optimizer) if keeps_masters(sub)]
    mastered = {id(parameter) for sub in subs for parameter in optimizer_state.sharded(sub)}
    idle = [sub for sub in subs if not quantizes_masters(sub)]
    unfilled = {id(parameter) for sub in idle for parameter in optimizer_state.sharded(sub)}
    return [
        *_line(
            "weights of a tensor class into which this Megatron cannot quantize masters",
            (
                f"{names[id(parameter)]} ({type(parameter).__name__})"
                for parameter in quantized
                if not is_known_to_megatron(parameter)
            ),
        ),
        *_line(
            "FP8 or FP4 weights without fp32 masters in a DistributedOptimizer of this rank",
            (names[id(weight)] for weight in quantized if id(weight) not in mastered),
        ),
        *_line(
            "FP8 or FP4 weights that this Megatron does not make from their masters",
            (names[id(weight)] for weight in quantized if id(weight) in unfilled),
        ),
    ]


def _has_master(entry: OptimizerEntry) -> bool:
    return entry.is_master and entry.owned.dtype == torch.float32


def _is_rounded_master(entry: OptimizerEntry) -> bool:
    if is_quantized(entry.parameter):  # quantized from the rounded master, so not equal to it
        return True
    weight = entry.parameter.data.reshape(-1)[entry.start : entry.end]
    return torch.equal(entry.owned.reshape(-1).to(weight.dtype).to(weight.device), weight)


def _broken_chain(optimizer: Any) -> Iterator[str]:
    """Yield one line per optimizer whose inner optimizers cannot be found."""
    name = "chained_optimizers" if isinstance(optimizer, ChainedOptimizer) else "optimizer"
    if not hasattr(optimizer, name):
        yield f"{type(optimizer).__name__} has no '{name}'"
    elif isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.chained_optimizers:
            yield from _broken_chain(part)


def _missing_attributes(sub: Any) -> Iterator[str]:
    for kind, wanted in _ATTRIBUTES:
        for names in wanted if isinstance(sub, kind) else ():
            if not any(hasattr(sub, name) for name in names):
                yield f"{type(sub).__name__} has no {' or '.join(map(repr, names))}"


def _names(chunks: list[Any]) -> dict[int, str]:
    several = len(chunks) > 1
    return {
        id(parameter): f"chunk {number}: {name}" if several else name
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def _wrong_entries(sub: Any, entries: list[OptimizerEntry], names: dict[int, str]) -> Iterator[str]:
    """Compare the entries of `sub` with the tensors of its inner optimizer and its buffers."""
    kind = type(sub).__name__
    shown = {id(entry.owned): _name(entry.parameter, names) for entry in entries}
    listed = Counter(id(entry.owned) for entry in entries)
    yield from _line(
        f"{kind} lists several times",
        (shown[owned] for owned, count in listed.items() if count > 1),
    )
    groups = [group for inner in below(sub.optimizer) for group in inner.param_groups]
    stepped = {id(tensor): tensor for group in groups for tensor in group["params"]}
    # Frozen after the groups were built: no optimizer state, saved as a plain weight.
    frozen = {key for key, tensor in stepped.items() if key in names and not tensor.requires_grad}
    yield from _line(
        f"{type(sub.optimizer).__name__} steps tensors that {kind} does not list",
        (_name(stepped[key], names) for key in stepped.keys() - listed.keys() - frozen),
    )
    yield from _line(
        f"{kind} lists tensors that {type(sub.optimizer).__name__} does not step",
        (shown[key] for key in listed.keys() - stepped.keys()),
    )
    yield from _line(
        f"{kind} has tensors whose size differs from this rank's part of",
        (
            shown[id(entry.owned)]
            for entry in entries
            if not isinstance(entry.owned, torch.Tensor)
            or not 0 <= entry.start <= entry.end <= entry.parameter.numel()
            or entry.owned.numel() != entry.end - entry.start
            or (entry.start == entry.end and entry.parameter.numel() > 0)
        ),
    )
    if isinstance(sub, DistributedOptimizer):
        held = {id(entry.parameter) for entry in entries}
        yield from _line(
            f"{kind} has no master or state for its part of",
            (
                _name(parameter, names)
                for parameter in _in_own_part(sub)
                if id(parameter) not in held
            ),
        )


def _wrong_parameters(
    chunks: list[Any],
    entries: list[tuple[Any, list[OptimizerEntry]]],
    names: dict[int, str],
    elsewhere: set[int],
) -> Iterator[str]:
    """Compare the parameters of all optimizers with the parameters that require gradients.

    Args:
        elsewhere: ids of parameters that may lie entirely on other replicas.
    """
    held: Counter[int] = Counter()
    foreign: dict[int, torch.Tensor] = {}
    for sub, of_sub in entries:
        for parameter in _parameters_of(sub, of_sub):
            held[id(parameter)] += 1
            if id(parameter) not in names:
                foreign[id(parameter)] = parameter
    wanted = [
        parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad
    ]
    yield from _line(
        "in no optimizer of this rank, though it wants gradients",
        (
            names[id(parameter)]
            for parameter in wanted
            if not held[id(parameter)] and id(parameter) not in elsewhere
        ),
    )
    yield from _line(
        "in more than one place of the optimizers",
        (names[id(parameter)] for parameter in wanted if held[id(parameter)] > 1),
    )
    yield from _line(
        "in an optimizer, but in no model chunk",
        (_name(parameter, names) for parameter in foreign.values()),
    )


def _parameters_of(sub: Any, entries: list[OptimizerEntry]) -> Iterable[torch.Tensor]:
    """Return the parameters that `sub` trains, including those entirely on other replicas."""
    if isinstance(sub, DistributedOptimizer):
        return optimizer_state.sharded(sub)
    return [entry.parameter for entry in entries]


def _in_own_part(sub: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters that overlap this rank's part of the gradient buffers."""
    for of_buffer in sub.gbuf_ranges:
        for buckets in of_buffer.values():
            for bucket in buckets:
                yield from bucket["param_map"]


def _name(tensor: torch.Tensor, names: dict[int, str]) -> str:
    return names.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")


def _line(problem: str, names: Iterable[str]) -> Iterator[str]:
    """Yield one line with `problem` and `names`; nothing if `names` is empty."""
    listed = list(names)
    if listed:
        yield f"{problem}: {first_few(listed, most=_MOST_NAMES)}"
