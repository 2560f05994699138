"""Distributed optimizer state in `torch_dist` directories that store it by bucket.

`dp_reshardable`, the default since megatron-core 0.16, has one tensor per bucket and state, named
`[chained_N.]optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_D.bucket_idx_K.STATE`, without
the names of parameters. The reader rebuilds the model from the args, computes the layout of the
buckets, and proves it by a comparison of masters with weights.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from megatron_flashckpt.convert.common import ddp_buckets
from megatron_flashckpt.convert.common.contents import GlobalTensor, refuse_low_halves
from megatron_flashckpt.convert.common.tensor_parts import (
    ByKey,
    Part,
    by_kind,
    global_tensors,
    local_tensor,
)
from megatron_flashckpt.convert.readers.dcp import Reader
from megatron_flashckpt.errors import CorruptCheckpointError, UnsupportedError
from megatron_flashckpt.layout.piece import WEIGHT
from megatron_flashckpt.megatron_lm.rebuild.rank_model import LocalTensor, RankModel
from megatron_flashckpt.megatron_lm.rebuild.rank_models import rank_models

_BUCKET = re.compile(
    r"(?:chained_(?P<sub>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\."
    r"gbuf_idx_(?P<buffer>\d+)\.dtype_.*\.bucket_idx_(?P<bucket>\d+)\.(?P<state>[^.]+)"
)

_Buckets = dict[int, dict[str, dict[int, str]]]
"""Names of the tensors of one data-parallel group by buffer, state, bucket."""


def optimizer_tensors(
    reader: Reader, common: dict[str, Any], tensors: list[GlobalTensor]
) -> list[GlobalTensor]:
    """Return masters and states as global tensors.

    Args:
        common: the checkpoint's common state.
        tensors: global tensors of the model.

    Raises:
        UnsupportedError: the model cannot be rebuilt, or the state is in an older layout.
        CorruptCheckpointError: the buckets belong to another model, or contradict the weights.
    """
    args = common["args"]
    stored: dict[tuple[int, int], _Buckets] = {}
    for name in reader.tensors:
        match = _BUCKET.fullmatch(name)
        if match is not None:
            of_group = stored.setdefault((int(match["sub"] or 0), int(match["group"])), {})
            states = of_group.setdefault(int(match["buffer"]), defaultdict(dict))
            states[match["state"]][int(match["bucket"])] = name
    if not stored:
        raise UnsupportedError(
            f"{reader.directory}: stores optimizer state as one object per data-parallel group "
            "('dp_zero_gather_scatter'); save it once with --dist-ckpt-optim-fully-reshardable, or "
            "convert the weights alone with --weights-only"
        )
    models = rank_models(args)
    weights = by_kind(tensors)[WEIGHT]
    experts = ddp_buckets.has_experts(models)
    parts: list[Part] = []
    done = set()
    for model in models:
        for sub, chunks in enumerate(ddp_buckets.sub_optimizers(model, args, experts=experts)):
            of_experts = any(
                parameter.expert for _, parameters in chunks for parameter in parameters
            )
            group = (sub, model.expert_group if of_experts else model.dense_group)
            if group not in done and any(parameters for _, parameters in chunks):
                done.add(group)
                held = stored.get(group, {})
                parts += _group_parts(reader, held, model, args, chunks, weights)
    return global_tensors(parts)


def _group_parts(
    reader: Reader,
    stored: _Buckets,
    model: RankModel,
    args: Any,
    chunks: list[tuple[int, list[LocalTensor]]],
    weights: ByKey,
) -> list[Part]:
    """Return the parts that one data-parallel group holds."""
    where = f"{reader.directory}: optimizer of (tp {model.tp}, pp {model.pp}, ep {model.ep})"
    dtypes = {
        (number, parameter.name): weights[parameter.geometry.runs[0].key].dtype
        for number, parameters in chunks
        for parameter in parameters
    }
    names = [stored[number] for number in sorted(stored)]
    if not all(ddp_buckets.MAIN in states for states in names):
        raise UnsupportedError(
            f"{where}: has no fp32 masters (--use-precision-aware-optimizer); save it once without "
            "this option, or convert the weights alone with --weights-only"
        )
    for states in names:
        for name in states[ddp_buckets.MAIN].values():
            if reader.tensors[name].dtype == torch.int16:
                refuse_low_halves(f"{reader.directory}: {name}")
    numels = [
        tuple(
            reader.tensors[states[ddp_buckets.MAIN][bucket]].shape[0]
            for bucket in sorted(states[ddp_buckets.MAIN])
        )
        for states in names
    ]
    parts = []
    layout = ddp_buckets.layout(model, args, chunks, dtypes, numels, where)
    for buffer, states in zip(layout, names, strict=True):
        ranges = {
            (state, bucket): _ranges(reader, name)
            for state, by_bucket in states.items()
            for bucket, name in by_bucket.items()
        }
        parts += ddp_buckets.buffer_parts(
            buffer,
            {state: reader.tensors[names[0]].dtype for state, names in states.items()},
            lambda place: local_tensor(place.parameter.geometry, place.parameter.numel, weights),
            functools.partial(_read, ranges),
            where,
        )
    return parts


_Range = Callable[[int, int], torch.Tensor]


def _read(
    ranges: dict[tuple[str, int], _Range],
    state: str,
    place: ddp_buckets.Place,
    start: int,
    end: int,
) -> torch.Tensor:
    return ranges[state, place.bucket](place.start + start, place.start + end)


def _ranges(reader: Reader, name: str) -> _Range:
    """Return a function that reads elements `[start, end)` of a tensor with one axis."""
    chunks = sorted((offset[0], shape[0]) for offset, shape in reader.tensors[name].chunks.items())
    starts = [start for start, _ in chunks]

    def read(start: int, end: int) -> torch.Tensor:
        elements = torch.empty(end - start, dtype=reader.tensors[name].dtype)
        position = start
        while position < end:
            low, numel = chunks[bisect.bisect_right(starts, position) - 1]
            high = min(low + numel, end)
            if high <= position:
                raise CorruptCheckpointError(
                    f"{reader.directory}: {name} has no element {position}; convert another "
                    "iteration"
                )
            part = reader.elements(name, (low,), position - low, high - low)
            elements[position - start : high - start] = part
            position = high
        return elements

    return read
