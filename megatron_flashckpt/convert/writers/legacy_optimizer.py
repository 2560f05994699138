"""Optimizer state of one rank in the form of Megatron's legacy files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_flashckpt.convert.common import ddp_buckets
from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.tensor_parts import ByKey, local_dtype, local_tensor
from megatron_flashckpt.convert.readers.legacy_optimizer import grouped
from megatron_flashckpt.errors import MissingStateError, UnsupportedError
from megatron_flashckpt.layout.piece import BUFFER, MASTER, WEIGHT
from megatron_flashckpt.megatron_lm.rebuild.rank_model import LocalTensor, RankModel

_Chunks = list[tuple[int, list[LocalTensor]]]


def of_rank(
    model: RankModel, contents: Contents, tensors: dict[str, ByKey], *, experts: bool
) -> tuple[Any, Any]:
    """Return `optimizer` of a rank's state dict, and the contents of its `distrib_optim.pt`.

    A rank whose optimizers do not shard parameters has no such file: None.

    Raises:
        MissingStateError: masters or moments are missing; the message names all.
        UnsupportedError: the optimizer is Muon.
    """
    if "muon" in str(getattr(contents.args, "optimizer", "")):
        raise UnsupportedError(
            f"{contents.place}: --optimizer {contents.args.optimizer} divides the parameters "
            "among several optimizers, which is not written in this format; convert to "
            "torch_dist, or the weights alone with --weights-only"
        )
    subs = ddp_buckets.sub_optimizers(model, contents.args, experts=experts)
    saved = _saved(contents, len(subs), experts=experts)
    if not getattr(contents.args, "use_distributed_optimizer", False):
        _refuse_incomplete(contents, subs, tensors, ())
        states = [
            _plain(chunks, entry, contents, tensors)
            for chunks, entry in zip(subs, saved, strict=True)
        ]
        return _listed(states), None
    if not ddp_buckets.is_early(contents.args):
        saved = [_in_order_of_use(entry, chunks) for entry, chunks in zip(saved, subs, strict=True)]
    _refuse_incomplete(contents, subs, tensors, ("exp_avg", "exp_avg_sq"))
    held = [
        # As in Megatron, only the files of the first replica's ranks have dense state.
        None
        if not model.first_replica and not (experts and number == len(subs) - 1)
        else _buffers(model, contents.args, chunks, tensors)
        for number, chunks in enumerate(subs)
    ]
    return _listed([_without_tensors(entry) for entry in saved]), _listed(held)


def _listed(states: list[Any]) -> Any:
    """Return the list, or the state of a single sub-optimizer without a list, as Megatron does."""
    return states[0] if len(states) == 1 else states


def _saved(contents: Contents, count: int, *, experts: bool) -> list[dict[str, Any]]:
    """Return param groups, step and scaler of each of `count` sub-optimizers."""
    result = []
    for number in range(count):
        wanted = experts and number == count - 1
        entries = [
            ({**entry, "param_groups": groups})
            for entry in contents.optimizer or []
            if (groups := [g for g in entry["param_groups"] if _is_expert(g) == wanted])
        ]
        if not entries:
            raise MissingStateError(
                f"{contents.place}: has no param groups of "
                f"{'expert' if wanted else 'dense'} parameters, which the model of its args has"
            )
        groups = [group for entry in entries for group in entry["param_groups"]]
        result.append({**entries[0], "param_groups": groups})
    return result


def _in_order_of_use(saved: dict[str, Any], chunks: _Chunks) -> dict[str, Any]:
    """Return `saved` with its groups in the order in which this rank's parameters use them.

    Until core 0.13 Megatron creates the groups of a rank in that order, and its distributed
    optimizer loads them by number. On a stage without embedding, the group without weight decay is
    first. Later releases load groups by their settings.
    """
    first = next((parameters[0] for _, parameters in chunks if parameters), None)
    if first is None:
        return saved
    without = len(first.shape) == 1 or first.name.endswith(".bias")
    groups = sorted(saved["param_groups"], key=lambda group: (_multiplier(group) == 0.0) != without)
    return {**saved, "param_groups": groups}


def _multiplier(group: dict[str, Any]) -> float | None:
    """Return the factor of a group's weight decay, under either of Megatron's names."""
    return group.get("wd_mult", group.get("pre_wd_mult"))


def _is_expert(group: dict[str, Any]) -> bool:
    return bool(group.get("is_expert_parallel", False))


def _refuse_incomplete(
    contents: Contents,
    subs: Sequence[_Chunks],
    tensors: dict[str, ByKey],
    states: tuple[str, ...],
) -> None:
    missing = []
    keys = {
        run.key
        for chunks in subs
        for _, parameters in chunks
        for parameter in parameters
        for run in parameter.geometry.runs
    }
    for key in sorted(keys):
        has_masters = any(dtype.itemsize == 2 for dtype in tensors[WEIGHT][key].dtypes)
        kinds = (MASTER, *states) if has_masters else states
        missing += [f"{kind}/{key}" for kind in kinds if key not in tensors.get(kind, {})]
    if missing:
        raise MissingStateError(
            f"{contents.place}: lacks {', '.join(missing)}, which this format stores of every "
            "parameter; frozen parameters have none of it; convert the weights alone with "
            "--weights-only"
        )


def _without_tensors(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the distributed optimizer's entry of the state dict; its groups have the step."""
    step = saved["step"]
    groups = [
        group if step is None else {**group, "step": int(step)} for group in saved["param_groups"]
    ]
    return _with_scaler({"optimizer": {"param_groups": groups}}, saved)


def _with_scaler(state: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    if saved["grad_scaler"] is not None:
        state["grad_scaler"] = saved["grad_scaler"]
    return state


def _buffers(
    model: RankModel, args: Any, chunks: _Chunks, tensors: dict[str, ByKey]
) -> dict[Any, Any]:
    dtypes = {
        (number, parameter.name): local_dtype(parameter.geometry, tensors[WEIGHT])
        for number, parameters in chunks
        for parameter in parameters
    }
    if ddp_buckets.is_early(args):
        return _early_buffers(
            ddp_buckets.buffers(model, args, chunks, dtypes, ddp_buckets.EARLY), args, tensors
        )
    result: dict[Any, Any] = {"buckets_coalesced": True}
    for number, buffer in enumerate(
        ddp_buckets.buffers(model, args, chunks, dtypes, ddp_buckets.RULES[0])
    ):
        grad_dtype = _grad_dtype(buffer, args)
        held: dict[str, Any] = {}
        for name, kind in _kinds(buffer).items():
            flat = torch.zeros(buffer.numel, dtype=torch.float32)
            for place in buffer.places:
                start = buffer.coalesced_start(place)
                local = local_tensor(place.parameter.geometry, place.parameter.numel, tensors[kind])
                flat[start : start + place.parameter.numel] = local
            held[name] = flat
        result[number] = {(buffer.dtype, grad_dtype): {**held, "numel_unpadded": buffer.numel}}
    return result


def _early_buffers(
    layout: list[ddp_buckets.Buffer], args: Any, tensors: dict[str, ByKey]
) -> dict[Any, Any]:
    """Return buffers in the form of Megatron of early 2024: by bucket, with end padding."""
    replicas = args.data_parallel_size * getattr(args, "context_parallel_size", 1)
    padded = [
        tuple(-(-n // replicas) * replicas for n in buffer.bucket_numels) for buffer in layout
    ]
    dtypes = [_grad_dtype(buffer, args) for buffer in layout]
    result: dict[Any, Any] = {
        "per_bucket_numel": [{t: list(buffer)} for t, buffer in zip(dtypes, padded, strict=True)],
        "per_bucket_numel_unpadded": [
            {t: list(buffer.bucket_numels)} for t, buffer in zip(dtypes, layout, strict=True)
        ],
    }
    for number, (buffer, numels, dtype) in enumerate(zip(layout, padded, dtypes, strict=True)):
        held = {}
        for name, kind in _kinds(buffer).items():
            flats = [torch.zeros(numel, dtype=torch.float32) for numel in numels]
            for place in buffer.places:
                local = local_tensor(place.parameter.geometry, place.parameter.numel, tensors[kind])
                flats[place.bucket][place.start : place.start + place.parameter.numel] = local
            held[name] = flats
        result[number] = {dtype: held}
    return result


def _grad_dtype(buffer: ddp_buckets.Buffer, args: Any) -> torch.dtype:
    in_fp32 = getattr(args, "accumulate_allreduce_grads_in_fp32", False)
    return torch.float32 if in_fp32 else buffer.dtype


def _kinds(buffer: ddp_buckets.Buffer) -> dict[str, str]:
    """Return the kinds of our tensors by Megatron's names."""
    own = WEIGHT if buffer.dtype == torch.float32 else MASTER
    return {ddp_buckets.MAIN: own, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def _plain(
    chunks: _Chunks, saved: dict[str, Any], contents: Contents, tensors: dict[str, ByKey]
) -> dict[str, Any]:
    """Return the state dict of an optimizer that does not shard parameters, by their index."""
    states = [kind for kind in tensors if kind not in (WEIGHT, BUFFER, MASTER)]
    args = contents.args
    members = grouped(chunks, args, saved["param_groups"], contents.place)
    groups, masters = [], []
    state: dict[int, dict[str, torch.Tensor]] = {}
    for group, parameters in zip(saved["param_groups"], members, strict=True):
        indices = range(len(state), len(state) + len(parameters))
        groups.append({**group, "params": list(indices)})
        masters.append(
            [
                _local(parameter, tensors[MASTER])
                for _, parameter in parameters
                if local_dtype(parameter.geometry, tensors[WEIGHT]).itemsize == 2
            ]
        )
        for index, (_, parameter) in zip(indices, parameters, strict=True):
            state[index] = {
                kind: _local(parameter, tensors[kind])
                for kind in states
                if parameter.geometry.runs[0].key in tensors[kind]
            }
            if saved["step"] is not None:
                state[index]["step"] = torch.tensor(saved["step"], dtype=torch.float32)
    inner = {"state": state, "param_groups": groups}
    if not (args.bf16 or args.fp16):
        return inner
    return _with_scaler({"optimizer": inner, "fp32_from_fp16_params": masters}, saved)


def _local(parameter: LocalTensor, tensors: ByKey) -> torch.Tensor:
    return local_tensor(parameter.geometry, parameter.numel, tensors).view(parameter.shape)
