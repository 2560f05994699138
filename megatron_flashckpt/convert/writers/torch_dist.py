"""Writer of Megatron's `torch_dist` format, which Megatron loads with any parallel layout.

The distributed optimizer's state is written as `fully_reshardable` (every state in the shape of its
parameter), which megatron-core reads since 0.15. The plain optimizer's state has only one form.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor, several_types
from megatron_flashckpt.convert.common.frozen import refuse_partial_state
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.output_dir import (
    megatrons_directory,
    move_tracker,
    new_directory,
    save,
)
from megatron_flashckpt.convert.readers.dcp import METADATA
from megatron_flashckpt.convert.readers.torch_dist import COMMON, CONFIG, RESHARDABLE
from megatron_flashckpt.layout.piece import BUFFER, MASTER, WEIGHT

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_EXPERT = "is_expert_parallel"
#: Name of a parameter in its module, with the name of the part if Megatron splits the parameter.
_LEAF = re.compile(r"\.(?:(?:weight|bias)\.)?[^.]+$")


def write_torch_dist(contents: Contents, root: Path, options: Options) -> Path:
    """Write `contents` as a checkpoint under `root`; return its directory.

    Raises:
        ConfigError: a checkpoint of that iteration exists and may not be replaced.
        UnsupportedError: layers that share a key have several types. Megatron itself refuses to
            save such a model in this format. Or masters are split between weights and optimizer,
            or only some layers that share a key were frozen.
    """
    refuse_partial_state(contents)
    for tensor in contents.tensors:
        if len(tensor.dtypes) > 1:
            raise several_types(tensor.name, tensor.dtypes)
    directory = megatrons_directory(root, contents.iteration)
    distributed = bool(getattr(contents.args, "use_distributed_optimizer", False))
    with new_directory(directory, overwrite=options.overwrite) as fresh:
        files = _Files(fresh, options.shard_nbytes)
        for names, value in _objects(contents):
            files.add_object(names, value)
        for name, tensor in _named(contents, distributed=distributed):
            files.add_tensor(name, tensor)
        files.finish()
        save(_common(contents, distributed=distributed), fresh / COMMON)
        (fresh / CONFIG).write_text(json.dumps(_FORMAT))
    move_tracker(root, contents.iteration)
    return directory


class _Files:
    """The `.distcp` files and their metadata. At most one box is in memory."""

    def __init__(self, directory: Path, limit_nbytes: int) -> None:
        self._directory = directory
        self._limit_nbytes = limit_nbytes
        self._number = 0
        self._described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def add_object(self, names: Sequence[str], value: Any) -> None:
        """Write an object once, under several names."""
        # A list, because one rank may hold several objects of one name.
        info = self._append([value])
        for name in names:
            self._storage[MetadataIndex(name)] = info
            self._described[name] = BytesStorageMetadata()

    def add_tensor(self, name: str, tensor: GlobalTensor) -> None:
        chunks = []
        for offset, shape in tensor.boxes:
            box = tensor.read((offset, shape))
            if box.untyped_storage().nbytes() != box.nbytes:
                box = box.clone()  # torch.save writes the whole storage of a view
            self._storage[MetadataIndex(name, offset)] = self._append(box)
            chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
        properties = TensorProperties(dtype=tensor.dtype)
        self._described[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)

    def finish(self) -> None:
        with open(self._directory / METADATA, "wb") as file:
            pickle.dump(Metadata(self._described, storage_data=self._storage), file)

    def _append(self, value: Any) -> _StorageInfo:
        name = f"__0_{self._number}.distcp"
        start, end = save(value, self._directory / name, append=True)
        if end >= self._limit_nbytes:
            self._number += 1
        return _StorageInfo(name, start, end - start)


def _named(contents: Contents, *, distributed: bool) -> Iterator[tuple[str, GlobalTensor]]:
    """Yield all tensors with their names in the format."""
    stepped = {tensor.key for tensor in contents.tensors if tensor.kind == "exp_avg"}
    for tensor in contents.tensors:
        if tensor.kind in (WEIGHT, BUFFER):
            yield tensor.key, tensor
            if distributed and tensor.dtype == torch.float32 and tensor.key in stepped:
                # Megatron reads a parameter that is its own master a second time.
                yield f"optimizer.state.param.{tensor.key}", tensor
        elif tensor.kind == MASTER:
            master = "param" if distributed else "fp32_param"
            yield f"optimizer.state.{master}.{tensor.key}", tensor
        else:
            yield f"optimizer.state.{tensor.kind}.{tensor.key}", tensor


def _objects(contents: Contents) -> Iterator[tuple[Sequence[str], Any]]:
    """Yield random states and extra states, each with its unique keys in Megatron.

    Megatron reads an extra state, mostly an empty one, for every module that could have one. The
    set depends on the layer implementation, so all are written; Megatron ignores the others.
    """
    grid = [max(numbers) + 1 for numbers in zip(*contents.rng, strict=True)]
    for place, states in sorted(contents.rng.items()):
        yield _keys_of_random_states(place, tuple(grid), contents.args), states
    names = dict(contents.objects)
    for tensor in contents.tensors:
        if tensor.kind != WEIGHT:
            continue
        counts = tensor.shape[: tensor.stacking_axes] or (1,)
        path = _LEAF.sub("", tensor.key)
        modules = [path]
        if path.endswith("attention.linear_proj"):
            modules.append(path.replace("linear_proj", "core_attention"))  # has no tensors
        for module in modules:
            for numbers in itertools.product(*map(range, counts)):
                key = _unique_key(f"{module}._extra_state", numbers, counts)
                names.setdefault(key, None)
    for name, value in names.items():
        yield (name,), value


def _keys_of_random_states(place: tuple[int, ...], grid: tuple[int, ...], args: Any) -> list[str]:
    """Return the keys under which Megatron reads the random states of a place in the grid.

    With expert parallelism core 0.16 reads them by data-parallel rank, other releases do not.
    """
    keys = [_unique_key("rng_state", place, grid)]
    if (getattr(args, "expert_model_parallel_size", None) or 1) > 1:
        sizes = ("data_parallel_size", "context_parallel_size")
        replicas = math.prod(getattr(args, size, None) or 1 for size in sizes)
        keys += [
            _unique_key("rng_state", (*place, replica), (*grid, replicas))
            for replica in range(replicas)
        ]
    return keys


def _unique_key(key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> str:
    return f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"


def _common(contents: Contents, *, distributed: bool) -> dict[str, Any]:
    """Return the contents of `common.pt`: state that is neither a tensor nor per rank."""
    args = copy.copy(contents.args)
    args.ckpt_format, args.use_dist_ckpt = "torch_dist", True
    # With these flags Megatron does not read the state that is missing.
    args.no_save_optim = contents.optimizer is None
    args.no_save_rng = not contents.rng
    common = {**contents.common, "args": args}
    # Used since core 0.16; older releases ignore it.
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if distributed:
        metadata["distrib_optim_sharding_type"] = RESHARDABLE
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    common["content_metadata"] = metadata
    if contents.optimizer is not None:
        chained = [
            _optimizer_state(part, contents, distributed=distributed)
            for part in _chained(contents.optimizer)
        ]
        common["optimizer"] = chained[0] if len(chained) == 1 else dict(enumerate(chained))
    return common


def _chained(optimizer: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the entries by Megatron's optimizers, in the order in which Megatron chains these.

    Experts have an optimizer of their own. With Muon, so have the parameters that Muon does not
    step: they have Adam or Lion, whose groups have `betas`.
    """
    parts: dict[bool, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}
    for entry in optimizer:
        has_betas = any("betas" in group for group in entry["param_groups"])
        dense, experts = parts.setdefault(has_betas, ([], []))
        (experts if _is_expert(entry) else dense).append(entry)
    return [part for pair in parts.values() for part in pair if part]


def _is_expert(entry: dict[str, Any]) -> bool:
    return any(group.get(_EXPERT) for group in entry["param_groups"])


def _optimizer_state(
    entries: list[dict[str, Any]], contents: Contents, *, distributed: bool
) -> dict[str, Any]:
    steps = [
        entry["step"] if entry["step"] is not None else group.get("step")
        for entry in entries
        for group in entry["param_groups"]
    ]
    step = max((float(step) for step in steps if step is not None), default=None)
    groups = [dict(group) for entry in entries for group in entry["param_groups"]]
    inner: dict[str, Any] = {"param_groups": groups}
    if step is not None:
        # Fused optimizers have the step in the groups, torch's own per parameter (here: in common).
        for group in groups:
            group["step"] = int(step)
        if not distributed and all(entry["step"] is not None for entry in entries):
            inner["state"] = {"common_step": torch.tensor(step)}
    mixed = any(tensor.kind == MASTER for tensor in contents.tensors)
    state: dict[str, Any] = {"optimizer": inner} if distributed or mixed else inner
    scalers = [entry["grad_scaler"] for entry in entries if entry["grad_scaler"] is not None]
    if scalers:
        state["grad_scaler"] = scalers[0]
    if distributed:
        state["param_state_sharding_type"] = RESHARDABLE
    return state
