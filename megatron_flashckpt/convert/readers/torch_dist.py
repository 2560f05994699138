"""Reader of Megatron's `torch_dist` format.

    .metadata       global shape, chunks and file positions of every tensor and object
    __R_T.distcp    chunks and objects, each as `torch.save` writes it
    common.pt       args, scheduler, counters, param groups
    metadata.json   names the format

The name of a model tensor is its key, that of an optimizer tensor `optimizer.state.<state>.<key>`.
Chained optimizers of older releases have the prefix `chained_<n>.`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_flashckpt.convert.common import safe_pickle
from megatron_flashckpt.convert.common.contents import (
    Contents,
    GlobalTensor,
    of_boxes,
    refuse_low_halves,
)
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.readers.dcp import Reader, StoredTensor
from megatron_flashckpt.convert.readers.dp_reshardable import optimizer_tensors
from megatron_flashckpt.convert.readers.legacy_optimizer import hyper_parameters
from megatron_flashckpt.errors import CorruptCheckpointError, UnsupportedError
from megatron_flashckpt.layout.piece import BUFFER, MASTER, WEIGHT, Shape
from megatron_flashckpt.layout.reshard import Box
from megatron_flashckpt.megatron_lm.hyper_parameters import merge

COMMON = "common.pt"
_COMMON_STATE = "common_state"
CONFIG = "metadata.json"

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+)\.(?P<key>.+)")
_BUCKET = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.")
_SHARD = re.compile(r"(?P<key>.+)/shard_(?P<offset>\d+(?:\.\d+)*)_(?P<shape>\d+(?:\.\d+)*)")
#: Names of the fp32 masters: the distributed optimizer's, and those of others.
_MASTERS = ("param", "fp32_param", "master_param")
#: Model tensors that are buffers, which the format does not distinguish from parameters.
_BUFFERS = ("expert_bias", "global_tokens_per_expert", "ga_steps", "local_tokens_per_expert")
RESHARDABLE = "fully_reshardable"


def open_torch_dist(directory: Path, iteration: int, options: Options) -> Contents:
    """Return the checkpoint in `directory`.

    Raises:
        UnsupportedError: the directory holds unknown objects, or the model cannot be rebuilt,
            which some layouts of optimizer state require.
        CorruptCheckpointError: files are damaged or missing.
    """
    _refuse_another_backend(directory)
    reader = Reader(directory)
    common = _common(directory, reader)
    if iteration == 0:  # a release may have the last iteration of its training
        common["iteration"] = 0
    tensors, doubles = _tensors(reader, with_optimizer=not options.weights_only)
    saved = common.pop("optimizer", None)
    optimizer = None if options.weights_only or saved is None else _optimizers(saved)
    sharding = (common.pop("content_metadata", None) or {}).get("distrib_optim_sharding_type")
    if optimizer is not None and any(map(_BUCKET.match, [*reader.tensors, *reader.objects()])):
        optimizer = _groups_by_bucket(reader, optimizer)
        tensors += optimizer_tensors(reader, common, tensors)
    suspicion = None
    if optimizer is not None and getattr(common["args"], "use_precision_aware_optimizer", False):
        _refuse_low_halves_in_fp32(directory, tensors)
    if optimizer is not None and sharding == RESHARDABLE:
        suspicion = (
            "megatron-core 0.15.0 to 0.19.0 wrote wrong optimizer state in the format "
            "'fully_reshardable' if it had more than one gradient bucket, with end padding (fixed "
            "in August 2026); the checkpoint does not state the release that wrote it"
        )
    return Contents(
        place=str(directory),
        iteration=iteration,
        common=common,
        tensors=sorted(tensors, key=lambda tensor: (tensor.key, tensor.kind)),
        optimizer=optimizer,
        rng=_random_states(reader),
        objects=_objects(reader),
        suspicion=suspicion,
        doubles=tuple(doubles),
    )


def _refuse_another_backend(directory: Path) -> None:
    """Raise if tensors are stored in another of Megatron's backends (zarr, until core 0.15)."""
    try:
        described = json.loads((directory / CONFIG).read_bytes())
    except (ValueError, RecursionError):
        return  # damaged; the other files decide
    backend = described.get("sharded_backend") if isinstance(described, dict) else None
    if backend not in (None, "torch_dist"):
        raise UnsupportedError(
            f"{directory}: stores tensors as '{backend}', which is not converted; let the Megatron "
            "that wrote it load and save it as torch_dist"
        )


def _refuse_low_halves_in_fp32(directory: Path, tensors: list[GlobalTensor]) -> None:
    """Raise if masters hold low halves: integers, which Megatron writes as fp32 numbers."""
    # Not norms, which are whole numbers before the first step that changes them: 1 or 0.
    masters = (tensor for tensor in tensors if tensor.kind == MASTER)
    matrices = (tensor for tensor in masters if len(tensor.shape) > 1 + tensor.stacking_axes)
    master = next(matrices, None)
    if master is not None and master.boxes:
        sample = master.read(master.boxes[0])
        if bool((sample == sample.trunc()).all()) and bool(sample.any()):
            refuse_low_halves(f"{directory}: {master.name}")


def _common(directory: Path, reader: Reader) -> dict[str, Any]:
    """Return the state that is equal on all ranks: a file, and since core 0.19 one of the objects.

    As in Megatron, the file counts if there are both.
    """
    place = directory / COMMON
    try:
        common = safe_pickle.load(place, str(place))
    except FileNotFoundError:
        objects = [reader.object(name) for name, key, _ in _shards(reader) if key == _COMMON_STATE]
        if not objects or not isinstance(objects[0], list) or len(objects[0]) != 1:
            raise CorruptCheckpointError(
                f"{place}: is missing; convert another iteration"
            ) from None
        common, place = objects[0][0], directory
    if not isinstance(common, dict) or "args" not in common:
        raise CorruptCheckpointError(
            f"{place}: holds no training arguments, so it is not a checkpoint of Megatron-LM"
        )
    args = common["args"]
    if isinstance(args, types.SimpleNamespace):
        copied = argparse.Namespace()
        vars(copied).update(vars(args))
        common["args"] = copied
    common.setdefault("num_floating_point_operations_so_far", 0)
    common.setdefault("opt_param_scheduler", None)
    common.pop("rerun_state_machine", None)
    return common


def _optimizers(saved: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return `Contents.optimizer`; a chained optimizer's state is one level deeper."""
    if saved and all(isinstance(number, int) for number in saved):
        return hyper_parameters([saved[number] for number in sorted(saved)])
    return hyper_parameters(saved)


# ---------------------------------------------------------------------- tensors


def _tensors(
    reader: Reader, *, with_optimizer: bool
) -> tuple[list[GlobalTensor], list[GlobalTensor]]:
    """Return all tensors that are not stored by bucket, and the doubles of fp32 parameters."""
    tensors: dict[tuple[str, str], GlobalTensor] = {}
    for name, stored in reader.tensors.items():
        if _BUCKET.match(name):
            continue
        match = _STATE.fullmatch(name)
        if match is None:
            kind = BUFFER if name.rpartition(".")[2] in _BUFFERS else WEIGHT
            tensor = _tensor(reader, name, stored, kind, name)
        elif not with_optimizer:
            continue
        else:
            kind = MASTER if match["state"] in _MASTERS else match["state"]
            tensor = _tensor(reader, name, stored, kind, match["key"])
        if kind == MASTER and stored.dtype == torch.int16:
            refuse_low_halves(f"{reader.directory}: {name}")
        tensors[kind, tensor.key] = tensor
    # The distributed optimizer also stores fp32 parameters, which are their own masters.
    doubles = [
        tensor
        for (kind, key), tensor in tensors.items()
        if kind == MASTER
        and (WEIGHT, key) in tensors
        and tensors[WEIGHT, key].dtype == tensor.dtype
    ]
    for tensor in doubles:
        del tensors[tensor.kind, tensor.key]
    return list(tensors.values()), doubles


def _tensor(reader: Reader, name: str, stored: StoredTensor, kind: str, key: str) -> GlobalTensor:
    if stored.original_shape is not None:
        return _flattened(reader, name, stored, kind, key)
    dtypes = dict.fromkeys(stored.chunks.items(), stored.dtype)
    return of_boxes(
        key, kind, stored.dtype, stored.shape, dtypes, lambda box: reader.chunk(name, box[0])
    )


def _flattened(
    reader: Reader, name: str, stored: StoredTensor, kind: str, key: str
) -> GlobalTensor:
    """Return a tensor whose boxes are stored as flattened ranges (see `StoredTensor`)."""
    whole_shape = stored.original_shape or ()
    counts = stored.shape[:-1]
    extent = tuple(n // count for n, count in zip(whole_shape, counts, strict=True))
    runs: dict[Box, dict[int, Shape]] = defaultdict(dict)
    for offset in stored.chunks:
        *numbers, start = offset
        low = tuple(number * n for number, n in zip(numbers, extent, strict=True))
        runs[low, extent][start] = offset

    def read_box(box: Box) -> torch.Tensor:
        flat = torch.empty(math.prod(extent), dtype=stored.dtype)
        missing = flat.numel()
        for start, offset in runs[box].items():
            chunk = reader.chunk(name, offset).reshape(-1)
            flat[start : start + chunk.numel()] = chunk
            missing -= chunk.numel()
        if missing:
            raise CorruptCheckpointError(
                f"{reader.directory}: {name}: {missing} elements of the box at {box[0]} are missing"
            )
        return flat.view(extent)

    dtypes = dict.fromkeys(runs, stored.dtype)
    return of_boxes(key, kind, stored.dtype, whole_shape, dtypes, read_box)


# ---------------------------------------------------------------------- objects


def _shards(reader: Reader) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield `(name, key, offset)` of all objects."""
    for name in reader.objects():
        match = _SHARD.fullmatch(name)
        if match is not None:
            yield name, match["key"], tuple(map(int, match["offset"].split(".")))


def _random_states(reader: Reader) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the random states by pipeline and tensor rank.

    With expert parallelism core 0.16 saves them by data-parallel rank, too. The first rank's are
    returned, which are all that other releases save.
    """
    return {
        (offset[0], offset[1]): reader.object(name)[0]
        for name, key, offset in _shards(reader)
        if key == "rng_state" and len(offset) in (2, 3) and not any(offset[2:])
    }


def _objects(reader: Reader) -> dict[str, Any]:
    states = {
        name: reader.object(name)[0]
        for name, key, _ in _shards(reader)
        if key.endswith("._extra_state")
    }
    return {name: state for name, state in states.items() if state is not None}


def _groups_by_bucket(reader: Reader, optimizer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the param groups, merged from the objects of all data-parallel groups."""
    states: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, key, _ in _shards(reader):
        match = _BUCKET.match(key)
        if match is not None and key[match.end() :] in ("optimizer", "grad_scaler"):
            states[match[0]][key[match.end() :]] = reader.object(name)[0]
    return merge([hyper_parameters(state) for state in states.values()]) or optimizer
