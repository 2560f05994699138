"""What a checkpoint holds, whatever its format: every source makes it, every destination takes it.

Global tensors are read box by box while the destination is written, so a conversion needs memory
for a few boxes and not for the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron_flashckpt.layout.piece import Shape

Box = tuple[Shape, Shape]
"""Offset and shape of an axis-aligned region of a global tensor."""


@dataclasses.dataclass(frozen=True)
class GlobalTensor:
    """One tensor of the model or the optimizer, as a whole."""

    key: str
    """Megatron's key in its sharded state dict; like layers are stacked along leading axes."""
    kind: str
    """`weight`, `buffer`, `master`, or the optimizer's name of a state (`exp_avg`, ...)."""
    dtype: torch.dtype
    shape: Shape
    boxes: tuple[Box, ...]
    """Disjoint regions that the source holds, in its natural units. Together they are the whole
    tensor, but for optimizer state of frozen layers."""
    read: Callable[[Box], torch.Tensor]
    """Return the contents of any box that lies in `boxes`, contiguous, in the box's shape.

    Raises CorruptCheckpointError if the source cannot be trusted there."""


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

    @property
    def args(self) -> Any:
        return self.common["args"]
