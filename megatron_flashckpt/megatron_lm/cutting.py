"""Cuts local tensors into pieces, as views wherever that is possible."""

from __future__ import annotations

import msgspec
import torch

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.megatron_lm.tensor_geometry import Geometry

# A save makes one of these for each tensor. As structs that the garbage collector need not know of
# (nothing refers back to them) they take a fifth of the time of named tuples.


class LocalPiece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A piece and the local elements that it stands for."""

    piece: Piece
    tensor: torch.Tensor
    """Flat, without gradients: a view (of a non-contiguous source, a copy) of the elements."""
    early: bool = False
    """Whether something else than `optimizer.step()` may change it."""
    resizable: bool = False
    """Whether it may be stored in another global shape (padded vocabulary)."""
    copy: str = ""
    """Which copy of the tensor this rank has, if not the main one (`Geometry.copy`)."""
    origin: tuple[torch.Tensor, torch.Tensor] | None = None
    """A tensor that is not contiguous, and its contiguous copy, which `tensor` is a part of."""


# Calls of torch are much of what enumerating tens of thousands of tensors costs, so none is made
# that would change nothing.


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
    """Return local range `[start, end)`, whose elements `tensor` holds, as pieces."""
    parts = geometry.parts(kind, tensor.dtype, start, end)
    whole = flat(tensor)
    if len(parts) == 1 and parts[0].end - parts[0].start == whole.numel():  # nearly always
        return [LocalPiece(parts[0].piece, whole, early, geometry.resizable, geometry.copy)]
    return [
        LocalPiece(
            part.piece,
            whole[part.start - start : part.end - start],
            early,
            geometry.resizable,
            geometry.copy,
        )
        for part in parts
    ]


def to_fill(
    geometry: Geometry, kind: str, tensor: torch.Tensor, start: int, end: int
) -> list[LocalPiece]:
    """Return what `cut` does, for a load: `LoadPlan.finish` follows."""
    if tensor.is_contiguous():
        return cut(geometry, kind, tensor, start, end)
    refuse_shared_elements(geometry.name, tensor)
    # Its flattening is no view, so a copy is filled, and then copied back.
    copied = tensor.contiguous()
    return [
        msgspec.structs.replace(local, origin=(tensor, copied))
        for local in cut(geometry, kind, copied, start, end)
    ]


def refuse_shared_elements(name: str, tensor: torch.Tensor) -> None:
    """Raise if two elements of `tensor` may lie at one address, as in an expanded tensor.

    Raises:
        UnsupportedError: names the tensor.
    """
    if tensor.is_contiguous():
        return
    axes = sorted(
        (stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
    )
    reach = 0
    for stride, n in axes:
        if stride <= reach:
            raise UnsupportedError(
                f"{name}: elements of this tensor share memory (shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}), so a load could not set each of them; make it "
                "contiguous, or keep Megatron's own checkpointing for this job"
            )
        reach += stride * (n - 1)
