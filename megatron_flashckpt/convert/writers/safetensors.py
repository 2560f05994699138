"""Writer of consolidated weights by global name, in files for the Hugging Face tools.

    model-00001-of-0000N.safetensors ...
    model.safetensors.index.json       {"metadata": {"total_size": N}, "weight_map": {name: file}}

Megatron stacks layers and experts along leading axes; this writer separates them and names them as
Megatron's state dict does. It writes tensors box by box, so a tensor may be larger than memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from megatron_flashckpt.convert.common.contents import (
    STACKED_EXPERTS,
    STACKED_LAYERS,
    Contents,
    GlobalTensor,
    read_region,
    several_types,
)
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.output_dir import new_directory
from megatron_flashckpt.layout.piece import BUFFER, WEIGHT, Shape
from megatron_flashckpt.layout.reshard import Box, intersection
from megatron_flashckpt.megatron_lm.torch_dtypes import dtype_name

INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class _NamedRegion:
    """Tensor of the result: a region of a global tensor without its stacking axes."""

    name: str
    source: GlobalTensor
    region: Box
    shape: Shape
    boxes: tuple[Box, ...]
    """Boxes of the source that the region needs: of 15,000 experts only those of one."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        dtypes = {self.source.dtype_of(box) for box in self.boxes} or {self.source.dtype}
        if len(dtypes) > 1:
            raise several_types(self.name, dtypes)
        return dtypes.pop()


def write_safetensors(contents: Contents, directory: Path, options: Options) -> Path:
    """Write all weights and buffers into `directory`, the index last; return it.

    Raises:
        ConfigError: the directory is not empty and may not be replaced.
    """
    tensors = [
        named
        for tensor in contents.tensors
        if tensor.kind in (WEIGHT, BUFFER)
        for named in _unstacked(tensor)
    ]
    files = list(_files(sorted(tensors, key=lambda named: named.name), options.shard_nbytes))
    # If the path is a link, replace its target, not the link.
    with new_directory(directory.resolve(), overwrite=options.overwrite) as fresh:
        weight_map = {}
        for number, file_tensors in enumerate(files, 1):
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            _write(fresh / file, file_tensors)
            weight_map.update({named.name: file for named in file_tensors})
        total = sum(named.nbytes for named in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        encoded = msgspec.json.format(msgspec.json.encode(index), indent=2)
        (fresh / INDEX).write_bytes(encoded)
    return directory


def _unstacked(tensor: GlobalTensor) -> Iterator[_NamedRegion]:
    """Yield the parts of `tensor` that have names of their own."""
    axes = tensor.stacking_axes
    boxes_at: dict[tuple[int, ...], list[Box]] = defaultdict(list)
    for box in tensor.boxes:
        stacked = zip(box[0][:axes], box[1][:axes], strict=True)
        for numbers in itertools.product(*(range(low, low + n) for low, n in stacked)):
            boxes_at[numbers].append(box)
    pattern = STACKED_LAYERS.sub(lambda match: f"{match[0]}{{}}.", tensor.key, count=1)
    pattern = STACKED_EXPERTS.sub(".experts.local_experts.{}.", pattern, count=1)
    for numbers in itertools.product(*(range(n) for n in tensor.shape[:axes])):
        inner = tensor.shape[axes:]
        region = (*numbers, *(0 for _ in inner)), (*(1 for _ in numbers), *inner)
        boxes = tuple(boxes_at[numbers])
        yield _NamedRegion(pattern.format(*numbers), tensor, region, inner, boxes)


def _files(tensors: list[_NamedRegion], limit_nbytes: int) -> Iterator[list[_NamedRegion]]:
    """Yield the tensors of each file; a tensor above the limit has a file of its own."""
    file_tensors: list[_NamedRegion] = []
    free = limit_nbytes
    for named in tensors:
        if file_tensors and named.nbytes > free:
            yield file_tensors
            file_tensors, free = [], limit_nbytes
        file_tensors.append(named)
        free -= named.nbytes
    if file_tensors:
        yield file_tensors


def _write(path: Path, tensors: list[_NamedRegion]) -> None:
    # Wide elements first, so that every tensor is aligned, which torch needs for views.
    tensors = sorted(tensors, key=lambda named: -named.dtype.itemsize)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for named in tensors:
        entries[named.name] = {
            "dtype": dtype_name(named.dtype),
            "shape": list(named.shape),
            "data_offsets": [position, position + named.nbytes],
        }
        position += named.nbytes
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for named in tensors:
            for part in _slabs(named):
                file.write(_raw(part))


def _slabs(named: _NamedRegion) -> Iterator[torch.Tensor]:
    """Yield the region in row-major order, in parts that need each box of the source once.

    The parts follow the source's boxes along the first axis; row-major order allows no other split.
    """
    offset, extent = named.region
    axis = len(extent) - len(named.shape)
    if not named.shape:
        yield _read(named, named.region)
        return
    overlaps = [intersection(box, named.region) for box in named.boxes]
    ends = {common[0][axis] + common[1][axis] for common in overlaps if common is not None}
    low = offset[axis]
    for high in sorted(ends):
        part = (
            (*offset[:axis], low, *offset[axis + 1 :]),
            (*extent[:axis], high - low, *extent[axis + 1 :]),
        )
        yield _read(named, part)
        low = high


def _read(named: _NamedRegion, part: Box) -> torch.Tensor:
    if part in named.boxes:
        return named.source.read(part)
    return read_region(part, named.boxes, named.source.read, named.dtype, named.name)


def _raw(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
