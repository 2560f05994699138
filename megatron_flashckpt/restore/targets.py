"""Where restored bytes go."""

from __future__ import annotations

import torch

from megatron_flashckpt.layout.coverage import Read
from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.reshard import Run, regions

#: Elements are moved as integers of their size: bits, whatever they mean.
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_rounded(piece: Piece, tensor: torch.Tensor) -> bool:
    """Return whether `tensor` gets the masters `piece` as 16-bit floats, to the nearest, ties to
    even, like the weights that `optimizer.step()` makes of them.
    """
    return piece.dtype == "F32" and tensor.dtype in (torch.bfloat16, torch.float16)


class Targets:
    """The flat tensors that wanted pieces stand for, filled from runs of any other cut.

    Several threads may put different elements.

    Args:
        pieces: what is wanted.
        tensors: for each piece a flat tensor of its elements (or of its bytes). One of 16-bit
            floats may stand for a piece of type F32, which is rounded as the optimizer rounds.
    """

    def __init__(self, pieces: list[Piece], tensors: list[torch.Tensor]) -> None:
        self._runs = [Run.of(piece) for piece in pieces]
        self._stored = [
            torch.float32 if is_rounded(piece, tensor) else _CARRIER[itemsize(piece.dtype)]
            for piece, tensor in zip(pieces, tensors, strict=True)
        ]
        self._tensors = [
            tensor if is_rounded(piece, tensor) else tensor.view(carrier)
            for piece, tensor, carrier in zip(pieces, tensors, self._stored, strict=True)
        ]

    def place(self, read: Read, offset: int, nbytes: int) -> memoryview | None:
        """Return the memory that is to hold `nbytes` bytes of `read.stored` from byte `offset` of
        `read` on, if it is host memory without a gap that takes them as they are; else None.
        """
        target = self._tensors[read.wanted]
        if target.device.type != "cpu" or not target.is_contiguous():
            return None
        if target.dtype != self._stored[read.wanted]:  # they are rounded on the way
            return None
        size = target.itemsize
        first = read.stored.start + offset // size
        run = read.stored._replace(start=first, end=first + nbytes // size)
        found = regions(run, self._runs[read.wanted])
        if len(found) != 1 or not found[0].gapless or found[0].shape != (nbytes // size,):
            return None
        begin = found[0].target_start
        memory: memoryview = target[begin : begin + nbytes // size].view(torch.uint8).numpy().data
        return memory

    def put(self, read: Read, offset: int, source: memoryview) -> None:
        """Put `source`, the bytes of `read.stored` from byte `offset` of `read` on."""
        self.put_tensor(read, offset, torch.frombuffer(source, dtype=torch.uint8))

    def put_tensor(self, read: Read, offset: int, source: torch.Tensor) -> None:
        """Put the bytes `source` (flat, uint8), which start and end at whole elements."""
        target, stored = self._tensors[read.wanted], self._stored[read.wanted]
        elements = source.view(stored)
        first = read.stored.start + offset // stored.itemsize
        run = read.stored._replace(start=first, end=first + elements.numel())
        for shape, here, steps, there, target_steps in regions(run, self._runs[read.wanted]):
            torch.as_strided(target, shape, target_steps, target.storage_offset() + there).copy_(
                torch.as_strided(elements, shape, steps, elements.storage_offset() + here)
            )

    def zero(self, wanted: int) -> None:
        """Fill the tensor of piece `wanted` with zeros."""
        self._tensors[wanted].zero_()
