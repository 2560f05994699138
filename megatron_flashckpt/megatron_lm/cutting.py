"""Divides local tensors into pieces, as views where possible."""

from __future__ import annotations

import msgspec
import torch

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.layout.copies import CopyPlace
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry

# A load and a first save make one `LocalPiece` per tensor. Structs that the garbage collector
# ignores take a fifth of the time of named tuples; a `LocalPiece` cannot be part of a reference
# cycle.


class LocalPiece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A piece and its local elements."""

    piece: Piece
    tensor: torch.Tensor
    """The elements, flat and without gradients: a view, or a copy of a non-contiguous tensor."""
    resizable: bool = False
    """True if the stored global shape may differ (padded vocabulary)."""
    early: bool = False
    """True if other code than `optimizer.step()` may change the tensor."""
    copy: CopyPlace | None = None
    """In a load: place of the copy that this rank had saved (`Geometry.copy`)."""
    origin: tuple[torch.Tensor, torch.Tensor] | None = None
    """A non-contiguous tensor and its contiguous copy; `tensor` is a view of the copy."""


# Calls of torch dominate the time to enumerate tens of thousands of tensors, so calls without
# effect are skipped.


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flattened tensor, without gradients."""
    if tensor.dim() != 1:
        tensor = tensor.reshape(-1)
    return tensor.detach() if tensor.requires_grad else tensor


def section(flattened: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return elements `[start, end)` of a flat tensor."""
    return flattened if end - start == flattened.numel() else flattened[start:end]


def cut(
    geometry: Geometry, kind: str, tensor: torch.Tensor, start: int, end: int, early: bool = False
) -> list[LocalPiece]:
    """Return the pieces of local range `[start, end)`.

    Args:
        tensor: the elements of this range.
    """
    flattened = flat(tensor)
    return [
        LocalPiece(
            part.piece,
            section(flattened, part.start - start, part.end - start),
            resizable=geometry.resizable,
            early=early,
        )
        for part in geometry.parts(kind, tensor.dtype, start, end)
    ]


def to_fill(
    geometry: Geometry, kind: str, tensor: torch.Tensor, start: int, end: int
) -> list[LocalPiece]:
    """Return the pieces that a load fills for local range `[start, end)`.

    `LoadPlan.finish` copies filled copies back into non-contiguous tensors.
    """
    origin = None
    if not tensor.is_contiguous():
        refuse_shared_elements(geometry.name, tensor)
        # Flattening would copy, so the load fills a copy, which is copied back afterwards.
        origin = tensor, tensor.contiguous()
    filled = cut(geometry, kind, tensor if origin is None else origin[1], start, end)
    if origin is None and geometry.copy is None:
        return filled
    return [msgspec.structs.replace(local, origin=origin, copy=geometry.copy) for local in filled]


def refuse_shared_elements(name: str, tensor: torch.Tensor) -> None:
    """Raise if two elements of `tensor` may share an address, as in an expanded tensor.

    Raises:
        UnsupportedError: names the tensor.
    """
    if tensor.is_contiguous():
        return
    axes = sorted(
        (stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
    )
    extent = 0
    for stride, n in axes:
        if stride <= extent:
            raise UnsupportedError(
                f"{name}: elements of this tensor share memory (shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}), so a load could not set each of them; make it "
                "contiguous, or keep Megatron's own checkpointing for this job"
            )
        extent += stride * (n - 1)
