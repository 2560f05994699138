"""What a checkpoint holds, whatever its format: every source makes it, every destination takes it.

Global tensors are read box by box while the destination is written, so a conversion needs memory
for a few boxes and not for the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megatron_flashckpt.errors import LayoutError, UnsupportedError
from megatron_flashckpt.layout.piece import WEIGHT, Shape
from megatron_flashckpt.layout.reshard import Box, intersection


@dataclasses.dataclass(frozen=True)
class GlobalTensor:
    """One tensor of the model or the optimizer, as a whole."""

    key: str
    """Megatron's key in its sharded state dict; like layers are stacked along leading axes."""
    kind: str
    """`weight`, `buffer`, `master`, or the optimizer's name of a state (`exp_avg`, ...)."""
    dtype: torch.dtype
    """Of all boxes but those of `others`."""
    shape: Shape
    boxes: tuple[Box, ...]
    """Disjoint regions that the source holds, in its natural units. Together they are the whole
    tensor, but for optimizer state of frozen layers."""
    read: Callable[[Box], torch.Tensor]
    """Return the contents of any region that `boxes` cover, contiguous, in the region's shape.

    Raises CorruptCheckpointError if the source cannot be trusted there, and UnsupportedError if the
    region has boxes of several types."""
    others: Mapping[Box, torch.dtype] = dataclasses.field(default_factory=dict)
    """Types of boxes that are not of type `dtype`: layers that share a key may differ."""

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.key}"

    @property
    def nbytes(self) -> int:
        """Bytes of all boxes."""
        return sum(math.prod(box[1]) * self.dtype_of(box).itemsize for box in self.boxes)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Types of all boxes."""
        return {self.dtype_of(box) for box in self.boxes} or {self.dtype}

    def dtype_of(self, box: Box) -> torch.dtype:
        """Return the type of one of `boxes`."""
        return self.others.get(box, self.dtype)

    def dtype_at(self, region: Box) -> torch.dtype:
        """Return the type of the elements of a region.

        Raises:
            UnsupportedError: they are of several types.
        """
        if not self.others:
            return self.dtype
        found = {self.dtype_of(box) for box in self.boxes if intersection(box, region) is not None}
        if len(found) > 1:
            raise several_types(self.name, found)
        return next(iter(found), self.dtype)


@dataclasses.dataclass(frozen=True)
class Contents:
    """A whole checkpoint, opened for reading."""

    place: str
    """For messages."""
    iteration: int
    common: dict[str, Any]
    """Megatron's names: `args` (a Namespace), `checkpoint_version`, `iteration`,
    `num_floating_point_operations_so_far`, `opt_param_scheduler`."""
    tensors: list[GlobalTensor]
    """All kinds of one key next to each other."""
    optimizer: list[dict[str, Any]] | None
    """Per sub-optimizer `param_groups` (without params), `step` (a float; None where the groups
    have it), `grad_scaler` (its state dict or None). None: the source has no optimizer state."""
    rng: dict[tuple[int, int], list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Random states by `(pipeline rank, tensor rank)`, a list over the data-parallel ranks, in the
    form of `side_state.rng_state`. Empty: the source keeps none that can be used."""
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What modules keep beside tensors (TransformerEngine's FP8 state), by Megatron's unique key of
    the sharded object."""
    suspicion: str | None = None
    """Why the optimizer state may be damaged although the source says nothing of it; None: no
    reason to think so. Then masters are compared with weights before anything is written."""
    doubles: tuple[GlobalTensor, ...] = ()
    """fp32 parameters that the source keeps once more among the masters. They are no masters of
    their own; if they differ from the weights, the optimizer state is damaged."""
    warnings: tuple[str, ...] = ()
    """What of the source is not carried over, and what that means for the result."""

    @property
    def args(self) -> Any:
        return self.common["args"]


def read_region(
    region: Box,
    boxes: Iterable[Box],
    read_box: Callable[[Box], torch.Tensor],
    dtype: torch.dtype,
    name: str,
) -> torch.Tensor:
    """Return a region that is put together from whole boxes, which are read one at a time.

    Args:
        dtype: of a region without elements; else it is that of the boxes.

    Raises:
        UnsupportedError: the region has boxes of several types.
        LayoutError: the boxes do not cover it.
    """
    found: torch.Tensor | None = None
    left = math.prod(region[1])
    for box in boxes:
        common = intersection(box, region)
        if common is not None:
            part = read_box(box)
            if found is None:
                found = torch.empty(region[1], dtype=part.dtype)
            elif found.dtype != part.dtype:
                raise several_types(name, {found.dtype, part.dtype})
            found[_within(common, region)] = part[_within(common, box)]
            left -= math.prod(common[1])
    if left:
        raise LayoutError(f"{name}: {left} elements at {region[0]} are in no box of the source")
    return torch.empty(region[1], dtype=dtype) if found is None else found


def several_types(name: str, dtypes: Iterable[torch.dtype]) -> UnsupportedError:
    """Return the error that says that a region of tensor `name` is of several types."""
    listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    return UnsupportedError(
        f"{name}: has layers of several element types ({listed}), which the destination cannot "
        "keep in one tensor; convert to flashckpt or safetensors"
    )


def rounded(master: GlobalTensor, dtype: torch.dtype) -> GlobalTensor:
    """Return the weight that `master` rounds to."""

    def read(region: Box) -> torch.Tensor:
        return master.read(region).to(dtype)

    return dataclasses.replace(master, kind=WEIGHT, dtype=dtype, read=read)


def _within(part: Box, box: Box) -> tuple[slice, ...]:
    starts = (low - base for low, base in zip(part[0], box[0], strict=True))
    return tuple(slice(low, low + n) for low, n in zip(starts, part[1], strict=True))
