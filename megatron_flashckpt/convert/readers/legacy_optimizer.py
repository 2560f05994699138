"""The optimizer state in Megatron's legacy files, as parts with a place in the global tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_flashckpt.convert.common import ddp_buckets
from megatron_flashckpt.convert.common.tensor_parts import Part, part_of
from megatron_flashckpt.errors import CorruptCheckpointError, UnsupportedError
from megatron_flashckpt.layout.piece import MASTER
from megatron_flashckpt.megatron_lm.param_groups import described, differing
from megatron_flashckpt.megatron_lm.rebuild.rank_model import LocalTensor, RankModel

Weights = dict[tuple[int, str], torch.Tensor]
"""Parameters of a rank by chunk and name."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The optimizer state of one rank."""

    parts: list[Part]
    hyper_parameters: list[dict[str, Any]]
    """In the form of `hyper_parameters.hyper_parameters`."""


def distributed(
    model: RankModel,
    weights: Weights,
    args: Any,
    saved: Any,
    stored: Any,
    place: str,
    *,
    experts: bool,
    accept: bool = False,
) -> Found:
    """Return the state of the distributed optimizer.

    Args:
        saved: `optimizer` of the rank's state dict.
        stored: contents of `distrib_optim.pt`.
        place: of that file, for messages.
        accept: do not compare 16-bit weights with their masters.

    Raises:
        UnsupportedError: written before 2024, without the sizes of buckets.
        CorruptCheckpointError: the buffers are not those of this model, or contradict the weights.
    """
    subs = ddp_buckets.sub_optimizers(model, args, experts=experts)
    states = stored if isinstance(stored, list) else [stored]
    if len(states) != len(subs):
        raise CorruptCheckpointError(
            f"{place}: state of {len(states)} optimizers, by the args there are {len(subs)}; "
            f"{ddp_buckets.REMEDY}"
        )
    parts: list[Part] = []
    for chunks, state in zip(subs, states, strict=True):
        if state is None:
            # Dense state is in the files of the first replica's ranks only.
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
    return Found(parts, hyper_parameters(saved))


def _stored_numels(
    state: dict[str, Any], tensors: list[dict[str, Any]], place: str
) -> list[tuple[int, ...]]:
    """Return the sizes of each buffer's buckets, or its own size, as the file says them."""
    if state.get("buckets_coalesced"):
        return [(int(of_buffer["numel_unpadded"]),) for of_buffer in tensors]
    if "per_bucket_numel_unpadded" in state:  # until core 0.6
        sizes = [next(iter(each.values())) for each in state["per_bucket_numel_unpadded"]]
        return [tuple(int(numel) for numel in of_buffer) for of_buffer in sizes]
    raise UnsupportedError(
        f"{place}: does not say how large its buckets are (written before 2024); convert the "
        "weights alone with --weights-only, or load and save it once with a Megatron of 2024"
    )


def _buffer_parts(
    buffer: ddp_buckets.Buffer,
    tensors: dict[str, Any],
    weights: Weights,
    place: str,
    remedy: str | None,
) -> list[Part]:
    def read(kind: str, at: ddp_buckets.Place, start: int, end: int) -> torch.Tensor:
        stored = tensors[kind]
        if isinstance(stored, list):  # a tensor per bucket
            stored, base = stored[at.bucket], at.start
        else:
            base = buffer.coalesced_start(at)
        flat: torch.Tensor = stored[base + start : base + end]
        return flat

    def weight(at: ddp_buckets.Place) -> torch.Tensor:
        return weights[at.chunk, at.parameter.name]

    samples = {kind: it[0] if isinstance(it, list) else it for kind, it in tensors.items()}
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
) -> Found:
    """Return the state of optimizers that hold whole parameters, with masters or without.

    Raises:
        CorruptCheckpointError: the state is not that of this model, or contradicts the weights.
    """
    parts: list[Part] = []
    subs = ddp_buckets.sub_optimizers(model, args, experts=experts)
    for chunks, each in zip(subs, _listed(saved), strict=True):
        inner = each.get("optimizer", each)
        held = list(_of_parameters(chunks, weights, args, inner, each, place))
        ddp_buckets.verify(
            ((it.name, weight, master) for it, weight, master, _ in held if master is not None),
            place,
        )
        for parameter, weight, master, state in held:
            if master is not None:
                parts.append(part_of(parameter.geometry, MASTER, master))
            parts += [
                part_of(parameter.geometry, kind, value)
                for kind, value in state.items()
                if isinstance(value, torch.Tensor) and value.shape == weight.shape
            ]
    return Found(parts, hyper_parameters(saved))


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
                f"group {number} has {len(group['params'])} parameters, by the args "
                f"{len(parameters)}"
            )
    if problems:
        raise CorruptCheckpointError(f"{place}: {'; '.join(problems)}; {ddp_buckets.REMEDY}")
    for number, (group, parameters) in enumerate(zip(groups, members, strict=True)):
        of_group = iter(masters[number] if masters is not None else ())
        for index, (chunk, parameter) in zip(group["params"], parameters, strict=True):
            weight = weights[chunk, parameter.name]
            master = next(of_group) if masters is not None and weight.itemsize == 2 else None
            yield parameter, weight, master, inner["state"].get(index, {})


class GroupClass(NamedTuple):
    """Which parameters Megatron puts into one param group."""

    decayed: bool
    """False: without weight decay."""
    decoupled: bool
    """Whether with the learning rate of `--decoupled-lr`."""
    scaled: bool
    """Whether with what `--use-mup` scales: epsilon, or else the learning rate."""


def group_classes(groups: Sequence[dict[str, Any]], args: Any) -> list[GroupClass]:
    """Return which parameters are in each param group."""
    rate = getattr(args, "decoupled_lr", None)
    mup = _width(args) != 1
    epsilons = {group["eps"] for group in groups if "eps" in group}
    scaled_epsilon = None
    if mup and _scales_epsilon(args) and len(epsilons) > 1:
        # A restart may have changed --adam-eps, but not which of the two is the scaled one.
        scaled_epsilon = min(epsilons) if _width(args) > 1 else max(epsilons)
    found = []
    for group in groups:
        # Up to core 0.15 the one mark, since then the other.
        apart = group.get("is_decoupled_lr") or group.get("default_config") is False
        scaled = scaled_epsilon is not None and group.get("eps") == scaled_epsilon
        # With both flags, groups with a scaled epsilon are the hidden layers' and the output's.
        decoupled = rate is not None and bool(apart)
        if decoupled and mup and (scaled or not _scales_epsilon(args)):
            decoupled = group.get("max_lr") == rate
        if mup and not _scales_epsilon(args):
            scaled = bool(apart) and not decoupled
        weight_decay = group.get("wd_mult", group.get("pre_wd_mult"))
        found.append(GroupClass(weight_decay != 0.0, decoupled, scaled))
    return found


def class_of(parameter: LocalTensor, args: Any) -> GroupClass:
    """Return what `group_classes` returns for the group that the parameter is in."""
    decayed = len(parameter.shape) > 1 and not parameter.name.endswith(".bias")
    if getattr(args, "apply_wd_to_qk_layernorm", False):
        decayed |= "q_layernorm." in parameter.name or "k_layernorm." in parameter.name
    decoupled = getattr(args, "decoupled_lr", None) is not None and parameter.embedding_or_output
    if _width(args) == 1:
        scaled = False
    elif _scales_epsilon(args):
        scaled = parameter.scaled
    else:
        # SGD scales the rates of all others, and --decoupled-lr takes its own before either.
        scaled = not decoupled and parameter.scaled != (_optimizer_name(args) == "sgd")
    return GroupClass(decayed, decoupled, scaled)


def _width(args: Any) -> float:
    """Return how much wider the model is than that which `--use-mup` scales from."""
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
        place: of the groups, for messages.

    Raises:
        UnsupportedError: the settings of the groups do not say which parameters are in which.
    """
    classes = group_classes(groups, args)
    found: list[list[tuple[int, LocalTensor]]] = [[] for _ in classes]
    unclear = set()
    for number, parameters in chunks:
        for parameter in parameters:
            wanted = class_of(parameter, args)
            if classes.count(wanted) == 1:
                found[classes.index(wanted)].append((number, parameter))
            else:
                unclear.add(parameter.name)
    if unclear:
        telling = differing(groups)
        raise UnsupportedError(
            f"{place}: which param group holds {', '.join(sorted(unclear))} cannot be told from "
            f"the groups' settings {', '.join(described(group, telling) for group in groups)} and "
            f"the checkpoint's args; {ddp_buckets.REMEDY}"
        )
    return found


def hyper_parameters(saved: Any) -> list[dict[str, Any]]:
    """Return groups, steps and scaler of `optimizer` in a rank's state dict."""
    return [_hyper_parameters(each.get("optimizer", each), each) for each in _listed(saved)]


def _hyper_parameters(inner: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    steps = {
        float(state["step"])
        for state in inner.get("state", {}).values()
        if isinstance(state.get("step"), torch.Tensor)
    }
    if len(steps) > 1:
        raise UnsupportedError(
            f"parameters of one optimizer have different steps {sorted(steps)}, but a checkpoint "
            "has one for all of them; convert the weights alone with --weights-only"
        )
    return {
        "param_groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in inner["param_groups"]
        ],
        "step": steps.pop() if steps else None,
        "grad_scaler": saved.get("grad_scaler"),
    }


def _listed(saved: Any) -> list[dict[str, Any]]:
    """Return the state dicts of sub-optimizers; a single one is not in a list."""
    return saved if isinstance(saved, list) else [saved]
