"""Conversion between local tensors of ranks and global tensors."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

from megatron_flashckpt.convert.common.contents import GlobalTensor, of_boxes
from megatron_flashckpt.layout.reshard import Box
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry, Run

ByKey = dict[str, GlobalTensor]


def by_kind(tensors: Iterable[GlobalTensor]) -> dict[str, ByKey]:
    """Return the tensors by kind and key."""
    result: dict[str, ByKey] = defaultdict(dict)
    for tensor in tensors:
        result[tensor.kind][tensor.key] = tensor
    return dict(result)


@dataclasses.dataclass(frozen=True)
class Part:
    """Local tensor of one rank: a parameter, or optimizer state of its shape."""

    geometry: Geometry
    kind: str
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]
    """Return elements `[start, end)` of the flattened local tensor."""


def part_of(geometry: Geometry, kind: str, tensor: torch.Tensor) -> Part:
    """Return `tensor` as a part; its data is accessed only by `Part.read`."""
    flat = tensor.detach().reshape(-1)
    return Part(geometry, kind, tensor.dtype, lambda start, end: flat[start:end])


def global_tensors(parts: Iterable[Part]) -> list[GlobalTensor]:
    """Return the global tensors that consist of `parts`; kinds of one key are adjacent.

    Leaves out the copies that tensor, pipeline and expert parallelism make.
    """
    boxes_of: dict[tuple[str, str], dict[Box, tuple[Part, list[Run]]]] = defaultdict(dict)
    for part in parts:
        if not part.geometry.main:
            continue
        runs: dict[tuple[str, Box], list[Run]] = defaultdict(list)
        for run in part.geometry.runs:
            runs[run.key, (run.offset, run.shape)].append(run)
        for (key, box), box_runs in runs.items():
            boxes_of[key, part.kind].setdefault(box, (part, box_runs))
    return [_global_tensor(*name, boxes) for name, boxes in sorted(boxes_of.items())]


def _global_tensor(key: str, kind: str, boxes: dict[Box, tuple[Part, list[Run]]]) -> GlobalTensor:
    first, (run, *_) = next(iter(boxes.values()))

    def read_box(box: Box) -> torch.Tensor:
        part, runs = boxes[box]
        box_data = torch.empty(torch.Size(box[1]).numel(), dtype=part.dtype)
        for box_run in runs:
            local = part.read(box_run.local_start, box_run.local_start + box_run.numel)
            box_data[box_run.box_start : box_run.box_start + box_run.numel] = local
        return box_data.view(box[1])

    dtypes = {box: part.dtype for box, (part, _) in boxes.items()}
    return of_boxes(key, kind, first.dtype, run.global_shape, dtypes, read_box)


def local_tensor(geometry: Geometry, numel: int, tensors: dict[str, GlobalTensor]) -> torch.Tensor:
    """Return the flattened local tensor at `geometry`, read from the global tensors by key.

    A padded vocabulary is truncated, or filled with zeros, as Megatron does.
    """
    local = torch.zeros(numel, dtype=local_dtype(geometry, tensors))
    boxes: dict[Box, torch.Tensor] = {}
    for run in geometry.runs:
        box = (run.offset, run.shape)
        if box not in boxes:
            boxes = {box: _read_or_zeros(tensors[run.key], box)}
        part = boxes[box][run.box_start : run.box_start + run.numel]
        local[run.local_start : run.local_start + run.numel] = part
    return local


def local_dtype(geometry: Geometry, tensors: dict[str, GlobalTensor]) -> torch.dtype:
    """Return the type of the local tensor at `geometry`, from the global tensors by key."""
    (dtype,) = {
        tensors[run.key].dtype_at(_inside(tensors[run.key], (run.offset, run.shape)))
        for run in geometry.runs
    }
    return dtype


def _inside(tensor: GlobalTensor, box: Box) -> Box:
    """Return the part of `box` that lies in the global shape."""
    offset, shape = box
    return offset, tuple(
        max(min(size - low, n), 0) for low, n, size in zip(offset, shape, tensor.shape, strict=True)
    )


def _read_or_zeros(tensor: GlobalTensor, box: Box) -> torch.Tensor:
    """Return the flattened box, with zeros outside of the global shape."""
    offset, shape = box
    _, inner_shape = _inside(tensor, box)
    if inner_shape == shape:
        return tensor.read(box).reshape(-1)
    padded = torch.zeros(shape, dtype=tensor.dtype_at((offset, inner_shape)))
    if all(inner_shape):
        padded[tuple(slice(n) for n in inner_shape)] = tensor.read((offset, inner_shape))
    return padded.reshape(-1)
