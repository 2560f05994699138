"""Contents of a checkpoint, independent of its format: readers return it, writers take it.

Writers read global tensors box by box, so a conversion needs memory for a few boxes, not for the
model.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch

from megatron_flashckpt.errors import LayoutError, UnsupportedError
from megatron_flashckpt.layout.piece import WEIGHT, Shape
from megatron_flashckpt.layout.reshard import Box, intersection

#: The place in a key where a number of a layer or of an expert is left out, because the global
#: tensor stacks them. Layers of different kinds have their numbers in their keys.
STACKED_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d+\.)")
STACKED_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d+\.)")


@dataclasses.dataclass(frozen=True)
class GlobalTensor:
    """Global tensor of the model or the optimizer."""

    key: str
    """Megatron's key in its sharded state dict; equal layers are stacked along leading axes."""
    kind: str
    """`weight`, `buffer`, `master`, or the optimizer's name of a state (`exp_avg`, ...)."""
    dtype: torch.dtype
    """Element type of all boxes that are not in `others`."""
    shape: Shape
    boxes: tuple[Box, ...]
    """Disjoint regions as the source stores them. They cover the tensor, except for optimizer state
    of frozen layers."""
    read: Callable[[Box], torch.Tensor]
    """Return the contents of any region that `boxes` cover, contiguous, in the region's shape.

    Raises CorruptCheckpointError if the source is damaged there, and UnsupportedError if the
    region has boxes of several types."""
    others: Mapping[Box, torch.dtype] = dataclasses.field(default_factory=dict)
    """Types of boxes whose type is not `dtype`: layers that share a key may have several types."""

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.key}"

    @property
    def stacking_axes(self) -> int:
        """Number of leading axes over which layers, or experts, are stacked."""
        return sum(bool(place.search(self.key)) for place in (STACKED_LAYERS, STACKED_EXPERTS))

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
            UnsupportedError: the elements have several types.
        """
        if not self.others:
            return self.dtype
        dtypes = {self.dtype_of(box) for box in self.boxes if intersection(box, region) is not None}
        if len(dtypes) > 1:
            raise several_types(self.name, dtypes)
        return next(iter(dtypes), self.dtype)


@dataclasses.dataclass(frozen=True)
class Contents:
    """A checkpoint that is open for reading."""

    place: str
    """Directory, for messages."""
    iteration: int
    common: dict[str, Any]
    """Common state by Megatron's names: `args` (a Namespace), `checkpoint_version`, `iteration`,
    `num_floating_point_operations_so_far`, `opt_param_scheduler`."""
    tensors: list[GlobalTensor]
    """All tensors; kinds of one key are adjacent."""
    optimizer: list[dict[str, Any]] | None
    """Per sub-optimizer `param_groups` (without params), `step` (a float; None if the groups have
    it), `grad_scaler` (its state dict or None). None if the source has no optimizer state."""
    rng: dict[tuple[int, int], list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Random states by `(pipeline rank, tensor rank)`, a list over the data-parallel ranks, in the
    form of `side_state.rng_state`. Empty if the source has no usable ones."""
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of modules in addition to tensors (TransformerEngine's FP8 state), by Megatron's unique
    key of the sharded object."""
    suspicion: str | None = None
    """Reason to suspect undetected damage of the optimizer state; None if there is none. With a
    suspicion, masters are compared with weights before the result is written."""
    doubles: tuple[GlobalTensor, ...] = ()
    """fp32 parameters of which the source stores a second copy among the masters. If a copy differs
    from its weight, the optimizer state is damaged."""
    warnings: tuple[str, ...] = ()
    """Parts of the source that are not converted, and the consequence for the result."""

    @property
    def args(self) -> Any:
        return self.common["args"]


def of_boxes(
    key: str,
    kind: str,
    dtype: torch.dtype,
    shape: Shape,
    dtypes: Mapping[Box, torch.dtype],
    read_box: Callable[[Box], torch.Tensor],
) -> GlobalTensor:
    """Return a tensor whose source reads whole boxes; other regions are assembled from them.

    Args:
        dtype: element type of a region without elements.
        dtypes: element types by box.
    """

    def read(region: Box) -> torch.Tensor:
        if region in dtypes:
            return read_box(region)
        return read_region(region, dtypes, read_box, dtype, f"{kind}/{key}")

    others = {box: of_box for box, of_box in dtypes.items() if of_box != dtype}
    return GlobalTensor(key, kind, dtype, shape, tuple(sorted(dtypes)), read, others)


def read_region(
    region: Box,
    boxes: Iterable[Box],
    read_box: Callable[[Box], torch.Tensor],
    dtype: torch.dtype,
    name: str,
) -> torch.Tensor:
    """Return a region assembled from boxes, which are read one at a time.

    Args:
        dtype: element type of a region without elements; else the type is that of the boxes.

    Raises:
        UnsupportedError: the region has boxes of several types.
        LayoutError: the boxes do not cover the region.
    """
    result: torch.Tensor | None = None
    missing = math.prod(region[1])
    for box in boxes:
        common = intersection(box, region)
        if common is not None:
            part = read_box(box)
            if result is None:
                result = torch.empty(region[1], dtype=part.dtype)
            elif result.dtype != part.dtype:
                raise several_types(name, {result.dtype, part.dtype})
            result[_within(common, region)] = part[_within(common, box)]
            missing -= math.prod(common[1])
    if missing:
        raise LayoutError(f"{name}: {missing} elements at {region[0]} are in no box of the source")
    return torch.empty(region[1], dtype=dtype) if result is None else result


def several_types(name: str, dtypes: Iterable[torch.dtype]) -> UnsupportedError:
    """Return the error for a region of tensor `name` that has several types."""
    listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    return UnsupportedError(
        f"{name}: has layers of several element types ({listed}), which the destination cannot "
        "store in one tensor; convert to flashckpt or safetensors"
    )


def refuse_low_halves(name: str) -> NoReturn:
    """Raise UnsupportedError for the masters `name`, of which only the low halves are stored."""
    raise UnsupportedError(
        f"{name} holds the low halves of fp32 values (--use-precision-aware-optimizer with bf16), "
        "which no other format has; convert the weights alone with --weights-only"
    )


def rounded(master: GlobalTensor, args: Any, weight: GlobalTensor | None = None) -> GlobalTensor:
    """Return the weight that results from rounding `master` to the 16-bit type of the job.

    Args:
        weight: the stored weight, whose fp32 layers have no master and stay as they are.
    """
    dtype = torch.float16 if getattr(args, "fp16", False) else torch.bfloat16
    stored = {} if weight is None else {box: weight.dtype_of(box) for box in weight.boxes}
    of_master = dict.fromkeys(master.boxes, dtype)

    def read_box(box: Box) -> torch.Tensor:
        if weight is None or box in of_master:
            return master.read(box).to(dtype)
        return weight.read(box)

    return of_boxes(master.key, WEIGHT, dtype, master.shape, stored | of_master, read_box)


def _within(part: Box, box: Box) -> tuple[slice, ...]:
    starts = (low - base for low, base in zip(part[0], box[0], strict=True))
    return tuple(slice(low, low + n) for low, n in zip(starts, part[1], strict=True))
