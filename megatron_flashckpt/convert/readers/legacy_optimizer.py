"""Optimizer state in Megatron's legacy files, as parts with positions in the global tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_flashckpt.convert.common import ddp_buckets
from megatron_flashckpt.convert.common.frozen import FEWER
from megatron_flashckpt.convert.common.tensor_parts import Part, part_of
from megatron_flashckpt.errors import CorruptCheckpointError, UnsupportedError
from megatron_flashckpt.layout.piece import MASTER
from megatron_flashckpt.megatron_lm.param_groups import described, differing
from megatron_flashckpt.megatron_lm.rebuild.rank_model import LocalTensor, RankModel

Weights = dict[tuple[int, str], torch.Tensor]
"""Parameters of a rank by chunk and name."""


def distributed(
    model: RankModel,
    weights: Weights,
    args: Any,
    stored: Any,
    place: str,
    *,
    experts: bool,
    accept: bool,
) -> list[Part]:
    """Return the state of the distributed optimizer.

    Args:
        stored: contents of `distrib_optim.pt`.
        place: path of that file, for messages.
        accept: do not compare 16-bit weights with their masters.

    Raises:
        UnsupportedError: the file was written before 2024 and lacks the sizes of buckets.
        CorruptCheckpointError: the buffers belong to another model, or contradict the weights.
    """
    subs = ddp_buckets.sub_optimizers(model, args, experts=experts)
    states = listed(stored)
    _refuse_another_count(states, subs, place)
    parts: list[Part] = []
    for chunks, state in zip(subs, states, strict=True):
        if state is None:
            # Only the files of the first replica's ranks have dense state.
            continue
        held = {key: value for key, value in state.items() if isinstance(key, int)}
        tensors = [next(iter(held[number].values())) for number in sorted(held)]
        dtypes = {name: weight.dtype for name, weight in weights.items()}
        stored_numels = _stored_numels(state, tensors, place)
        layout = ddp_buckets.layout(
            model,
            args,
            chunks,
            dtypes,
            stored_numels,
            place,
            by_bucket=not state.get("buckets_coalesced"),
        )
        for buffer, of_buffer in zip(layout, tensors, strict=True):
            remedy = None if accept else ddp_buckets.remedy(args)
            parts += _buffer_parts(buffer, of_buffer, weights, place, remedy)
    return parts


def _refuse_another_count(states: Sequence[Any], subs: Sequence[Any], place: str) -> None:
    """Raise if the file has the state of another number of optimizers than a job of its args.

    With Muon, jobs have more.
    """
    if len(states) != len(subs):
        raise CorruptCheckpointError(
            f"{place}: has the state of {len(states)} optimizers, expected {len(subs)} by the "
            f"args; {ddp_buckets.REMEDY}"
        )


def _stored_numels(
    state: dict[str, Any], tensors: list[dict[str, Any]], place: str
) -> list[tuple[int, ...]]:
    """Return the sizes of each buffer's buckets, or the buffer's own size, from the file."""
    if state.get("buckets_coalesced"):
        return [(int(of_buffer["numel_unpadded"]),) for of_buffer in tensors]
    if "per_bucket_numel_unpadded" in state:  # until core 0.6
        sizes = [
            next(iter(bucket_numels.values()))
            for bucket_numels in state["per_bucket_numel_unpadded"]
        ]
        return [tuple(int(numel) for numel in of_buffer) for of_buffer in sizes]
    raise UnsupportedError(
        f"{place}: lacks the sizes of its buckets (written before 2024); convert the weights alone "
        "with --weights-only, or load and save the checkpoint once with a Megatron of 2024"
    )


def _buffer_parts(
    buffer: ddp_buckets.Buffer,
    tensors: dict[str, Any],
    weights: Weights,
    place: str,
    remedy: str | None,
) -> list[Part]:
    def read(kind: str, param_place: ddp_buckets.Place, start: int, end: int) -> torch.Tensor:
        stored = tensors[kind]
        if isinstance(stored, list):  # a tensor per bucket
            stored, base = stored[param_place.bucket], param_place.start
        else:
            base = buffer.coalesced_start(param_place)
        flat: torch.Tensor = stored[base + start : base + end]
        return flat

    def weight(param_place: ddp_buckets.Place) -> torch.Tensor:
        return weights[param_place.chunk, param_place.parameter.name]

    samples = {
        kind: value[0] if isinstance(value, list) else value for kind, value in tensors.items()
    }
    states = {
        kind: tensor.dtype for kind, tensor in samples.items() if isinstance(tensor, torch.Tensor)
    }
    return ddp_buckets.buffer_parts(buffer, states, weight, read, place, remedy)


def plain(
    model: RankModel,
    weights: Weights,
    args: Any,
    saved: Any,
    place: str,
    *,
    experts: bool,
) -> list[Part]:
    """Return the state of optimizers that do not shard parameters, with masters or without.

    Args:
        saved: `optimizer` of the rank's state dict.

    Raises:
        CorruptCheckpointError: the state belongs to another model, or contradicts the weights.
    """
    parts: list[Part] = []
    subs = ddp_buckets.sub_optimizers(model, args, experts=experts)
    _refuse_another_count(listed(saved), subs, place)
    for chunks, saved_state in zip(subs, listed(saved), strict=True):
        inner = saved_state.get("optimizer", saved_state)
        held = list(_of_parameters(chunks, weights, args, inner, saved_state, place))
        ddp_buckets.verify(
            (
                (parameter.name, weight, master)
                for parameter, weight, master, _ in held
                if master is not None
            ),
            place,
        )
        for parameter, weight, master, state in held:
            if master is not None:
                parts.append(part_of(parameter.geometry, MASTER, master))
            for kind, value in state.items():
                if kind == "step" or not isinstance(value, torch.Tensor):
                    continue
                if value.shape != weight.shape:
                    raise CorruptCheckpointError(
                        f"{place}: {kind} of {parameter.name} has the shape {tuple(value.shape)}, "
                        f"expected {tuple(weight.shape)}, so the optimizer state cannot be "
                        f"assigned to parameters; {ddp_buckets.REMEDY}"
                    )
                parts.append(part_of(parameter.geometry, kind, value))
    return parts


def _of_parameters(
    chunks: list[tuple[int, list[LocalTensor]]],
    weights: Weights,
    args: Any,
    inner: dict[str, Any],
    saved: dict[str, Any],
    place: str,
) -> Iterator[tuple[LocalTensor, torch.Tensor, torch.Tensor | None, dict[str, Any]]]:
    """Yield parameter, weight, master and optimizer state of all parameters."""
    masters = saved.get("fp32_from_fp16_params", saved.get("fp32_from_fp16"))
    groups = inner["param_groups"]
    members = grouped(chunks, args, groups, place)
    problems = []
    for number, (group, parameters) in enumerate(zip(groups, members, strict=True)):
        if len(group["params"]) != len(parameters):
            problems.append(
                f"group {number} has {len(group['params'])} parameters, expected "
                f"{len(parameters)} by the args"
            )
    if problems:
        fewer = all(
            len(group["params"]) <= len(parameters)
            for group, parameters in zip(groups, members, strict=True)
        )
        remedy = f"{FEWER}; or {ddp_buckets.REMEDY}" if fewer else ddp_buckets.REMEDY
        raise CorruptCheckpointError(f"{place}: {'; '.join(problems)}; {remedy}")
    for number, (group, parameters) in enumerate(zip(groups, members, strict=True)):
        of_group = iter(masters[number] if masters is not None else ())
        for index, (chunk, parameter) in zip(group["params"], parameters, strict=True):
            weight = weights[chunk, parameter.name]
            master = next(of_group) if masters is not None and weight.itemsize == 2 else None
            yield parameter, weight, master, inner["state"].get(index, {})


class GroupClass(NamedTuple):
    """Class of the parameters in one param group of Megatron."""

    decayed: bool
    """True if the group has weight decay."""
    decoupled: bool
    """True if the group has the learning rate of `--decoupled-lr`."""
    scaled: bool
    """True if `--use-mup` scales the group's epsilon, or else its learning rate."""


def group_classes(groups: Sequence[dict[str, Any]], args: Any) -> list[GroupClass]:
    """Return the class of the parameters in each param group."""
    rate = getattr(args, "decoupled_lr", None)
    mup = _width(args) != 1
    epsilons = {group["eps"] for group in groups if "eps" in group}
    scaled_epsilon = None
    if mup and _scales_epsilon(args) and len(epsilons) > 1:
        # A restart may change --adam-eps, but the scaled epsilon stays the smaller or larger one.
        scaled_epsilon = min(epsilons) if _width(args) > 1 else max(epsilons)
    classes = []
    for group in groups:
        # Up to core 0.15 `is_decoupled_lr` marks the group, since then `default_config`.
        is_marked = group.get("is_decoupled_lr") or group.get("default_config") is False
        scaled = scaled_epsilon is not None and group.get("eps") == scaled_epsilon
        # With both flags, the groups of hidden layers and of the output have a scaled epsilon.
        decoupled = rate is not None and bool(is_marked)
        if decoupled and mup and (scaled or not _scales_epsilon(args)):
            decoupled = group.get("max_lr") == rate
        if mup and not _scales_epsilon(args):
            scaled = bool(is_marked) and not decoupled
        weight_decay = group.get("wd_mult", group.get("pre_wd_mult"))
        classes.append(GroupClass(weight_decay != 0.0, decoupled, scaled))
    return classes


def class_of(parameter: LocalTensor, args: Any) -> GroupClass:
    """Return the class of the group that holds `parameter`; see `group_classes`."""
    decayed = len(parameter.shape) > 1 and not parameter.name.endswith(".bias")
    if getattr(args, "apply_wd_to_qk_layernorm", False):
        decayed |= "q_layernorm." in parameter.name or "k_layernorm." in parameter.name
    decoupled = getattr(args, "decoupled_lr", None) is not None and parameter.embedding_or_output
    if _width(args) == 1:
        scaled = False
    elif _scales_epsilon(args):
        scaled = parameter.scaled
    else:
        # SGD scales the rates of all other parameters; --decoupled-lr takes precedence.
        scaled = not decoupled and parameter.scaled != (_optimizer_name(args) == "sgd")
    return GroupClass(decayed, decoupled, scaled)


def _width(args: Any) -> float:
    """Return the model's width relative to the base model of `--use-mup`."""
    base = getattr(args, "mup_base_hidden_size", None)
    if not getattr(args, "use_mup", False) or not base:
        return 1.0
    return float(args.hidden_size / base)


def _optimizer_name(args: Any) -> str:
    return str(getattr(args, "optimizer", "adam")).lower()


def _scales_epsilon(args: Any) -> bool:
    return "adam" in _optimizer_name(args)


def grouped(
    chunks: list[tuple[int, list[LocalTensor]]],
    args: Any,
    groups: Sequence[dict[str, Any]],
    place: str,
) -> list[list[tuple[int, LocalTensor]]]:
    """Return the parameters of each group, with their chunks, in the order of the optimizer.

    Args:
        place: path of the groups' file, for messages.

    Raises:
        UnsupportedError: the groups' settings do not determine the group of each parameter.
    """
    classes = group_classes(groups, args)
    members: list[list[tuple[int, LocalTensor]]] = [[] for _ in classes]
    unclear = set()
    for number, parameters in chunks:
        for parameter in parameters:
            wanted = class_of(parameter, args)
            if classes.count(wanted) == 1:
                members[classes.index(wanted)].append((number, parameter))
            else:
                unclear.add(parameter.name)
    if unclear:
        telling = differing(groups)
        raise UnsupportedError(
            f"{place}: the param group of {', '.join(sorted(unclear))} does not follow from the "
            f"groups' settings {', '.join(described(group, telling) for group in groups)} and the "
            f"checkpoint's args; {ddp_buckets.REMEDY}"
        )
    return members


def hyper_parameters(saved: Any) -> list[dict[str, Any]]:
    """Return groups, steps and scaler of `optimizer` in a rank's state dict, or in torch_dist's."""
    return [_hyper_parameters(state) for state in listed(saved)]


def _hyper_parameters(saved: dict[str, Any]) -> dict[str, Any]:
    # FP32Optimizer saves the inner optimizer's state without the key `optimizer`.
    inner = saved.get("optimizer", saved)
    states = inner.get("state", {})
    steps = {
        float(state["step"])
        for state in states.values()
        if isinstance(state, dict) and isinstance(state.get("step"), torch.Tensor)
    }
    if states.get("common_step") is not None:  # that of all parameters, in torch_dist
        steps.add(float(states["common_step"]))
    if len(steps) > 1:
        raise UnsupportedError(
            f"parameters of one optimizer have different steps {sorted(steps)}, but the result can "
            "hold only one; convert the weights alone with --weights-only"
        )
    return {
        "param_groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in inner.get("param_groups", [])
        ],
        "step": steps.pop() if steps else None,
        "grad_scaler": saved.get("grad_scaler"),
    }


def listed(saved: Any) -> list[dict[str, Any]]:
    """Return the state dicts of sub-optimizers; Megatron saves a single one without a list."""
    return saved if isinstance(saved, list) else [saved]
