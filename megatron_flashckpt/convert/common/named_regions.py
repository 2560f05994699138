"""Tensors of a model by their names in Megatron's state dict.

Megatron stacks layers and experts along leading axes; here they are separated again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator

import torch

from megatron_flashckpt.convert.common.contents import (
    STACKED_EXPERTS,
    STACKED_LAYERS,
    GlobalTensor,
    read_region,
    several_types,
)
from megatron_flashckpt.convert.common.safetensors_files import StoredTensor
from megatron_flashckpt.layout.piece import BUFFER, WEIGHT, Shape
from megatron_flashckpt.layout.reshard import Box, intersection


@dataclasses.dataclass(frozen=True)
class NamedRegion:
    """A region of a global tensor without its stacking axes."""

    name: str
    source: GlobalTensor
    region: Box
    shape: Shape
    boxes: tuple[Box, ...]
    """Boxes of the source that the region needs: of 15,000 experts only those of one."""

    @property
    def dtype(self) -> torch.dtype:
        dtypes = {self.source.dtype_of(box) for box in self.boxes} or {self.source.dtype}
        if len(dtypes) > 1:
            raise several_types(self.name, dtypes)
        return dtypes.pop()

    def first_rows(self, count: int, name: str) -> NamedRegion:
        """Return the first `count` rows as a region with another name."""
        offset, extent = self.region
        axis = len(extent) - len(self.shape)
        extent = (*extent[:axis], count, *extent[axis + 1 :])
        return dataclasses.replace(
            self, name=name, region=(offset, extent), shape=(count, *self.shape[1:])
        )

    def stored(self) -> StoredTensor:
        """Return the region as a tensor that can be written."""
        return StoredTensor(self.name, self.dtype, self.shape, self._slabs)

    def read(self) -> torch.Tensor:
        """Return the whole region in its shape."""
        return self._read(self.region).reshape(self.shape)

    def _slabs(self) -> Iterator[torch.Tensor]:
        """Yield the region in row-major order, in parts that need each box of the source once.

        The parts follow the source's boxes along the first axis; row-major order allows no other
        split.
        """
        offset, extent = self.region
        axis = len(extent) - len(self.shape)
        if not self.shape:
            yield self._read(self.region)
            return
        overlaps = [intersection(box, self.region) for box in self.boxes]
        ends = {common[0][axis] + common[1][axis] for common in overlaps if common is not None}
        low = offset[axis]
        for high in sorted(ends):
            yield self._read(
                (
                    (*offset[:axis], low, *offset[axis + 1 :]),
                    (*extent[:axis], high - low, *extent[axis + 1 :]),
                )
            )
            low = high

    def _read(self, part: Box) -> torch.Tensor:
        if part in self.boxes:
            return self.source.read(part)
        return read_region(part, self.boxes, self.source.read, self.dtype, self.name)


def named_regions(tensors: list[GlobalTensor]) -> Iterator[NamedRegion]:
    """Yield all weights and buffers among `tensors` with their names in the state dict."""
    for tensor in tensors:
        if tensor.kind in (WEIGHT, BUFFER):
            yield from _unstacked(tensor)


def _unstacked(tensor: GlobalTensor) -> Iterator[NamedRegion]:
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
        yield NamedRegion(pattern.format(*numbers), tensor, region, inner, boxes)
