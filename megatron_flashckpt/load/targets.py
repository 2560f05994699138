"""Where restored bytes go."""

from __future__ import annotations

import torch

from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import Read
from megatron_flashckpt.layout.reshard import Run, regions
from megatron_flashckpt.load.chunk_reader import Part
from megatron_flashckpt.load.gpu_buffers import Gpu

#: Elements are moved as integers of their size: bits, whatever they mean.
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: To copy these to their like moves bits as well.
_FLOATS = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))


def is_rounded(piece: Piece, tensor: torch.Tensor) -> bool:
    """Return whether `tensor` gets the masters `piece` as 16-bit floats, to the nearest, ties to
    even, like the weights that `optimizer.step()` makes of them.
    """
    return piece.dtype == "F32" and tensor.dtype in (torch.bfloat16, torch.float16)


class Targets:
    """The flat tensors that wanted pieces stand for, filled from runs of any other cut.

    Several threads may put different elements. Made by the training thread.

    Args:
        pieces: what is wanted.
        tensors: for each piece a flat tensor of its elements (or of its bytes). One of 16-bit
            floats may stand for a piece of type F32, which is rounded as the optimizer rounds.
    """

    def __init__(self, pieces: list[Piece], tensors: list[torch.Tensor]) -> None:
        self._pieces = pieces
        self._tensors = tensors
        self.gpu = Gpu.of(tensors)
        """GPU that the load fills; None if all tensors lie in host memory."""

    def place(self, read: Read, offset: int, nbytes: int) -> memoryview | None:
        """Return the memory that is to hold `nbytes` bytes of `read.stored` from byte `offset` of
        `read` on, if it is host memory without a gap that takes them as they are; else None.
        """
        target = self._alike(read, offset, nbytes)
        if target is None:
            target = self._in_one_stretch(read, offset, nbytes)
        if target is None or target.device.type != "cpu" or not target.is_contiguous():
            return None
        memory: memoryview = target.view(torch.uint8).numpy().data
        return memory

    def _in_one_stretch(self, read: Read, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return the elements that take `nbytes` bytes of `read` from `offset` on as they are."""
        target, carrier = self._carried(read.wanted)
        if target.dtype != carrier:  # they are rounded on the way
            return None
        size = target.itemsize
        first = read.stored.start + offset // size
        run = read.stored._replace(start=first, end=first + nbytes // size)
        found = regions(run, Run.of(self._pieces[read.wanted]))
        if len(found) != 1 or not found[0].gapless or found[0].shape != (nbytes // size,):
            return None
        begin = found[0].target_start
        return target[begin : begin + nbytes // size]

    def put(self, parts: list[Part]) -> None:
        """Put parts of a chunk where they are wanted.

        In the layout that was saved most are as they are wanted: one call copies all of these, a
        quarter of what a call each takes. For a GPU, enqueue all copies of a chunk, then wait once:
        the caller reads the next chunk into the same buffer.
        """
        try:
            self._copy(parts, non_blocking=self.gpu is not None)
        finally:
            if self.gpu is not None:
                self.gpu.synchronize()

    def _copy(self, parts: list[Part], *, non_blocking: bool) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for part in parts:
            read, offset, source = part
            target = self._alike(read, offset, source.nbytes)
            if target is None:
                content = torch.frombuffer(source, dtype=torch.uint8)
                self.put_tensor(read, offset, content, non_blocking=non_blocking)
            else:
                targets.append(target)
                sources.append(torch.frombuffer(source, dtype=target.dtype))
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)

    def _alike(self, read: Read, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return the elements that `nbytes` bytes of `read` from `offset` on are, in one stretch.

        None: they are another box's, or to be turned into other elements.
        """
        piece, target, stored = self._pieces[read.wanted], self._tensors[read.wanted], read.stored
        if stored.offset != piece.offset or stored.shape != piece.shape:
            return None
        if target.dtype not in _FLOATS or target.itemsize != itemsize(piece.dtype):
            return None
        begin = stored.start - piece.start + offset // target.itemsize
        count = nbytes // target.itemsize
        return target if count == target.numel() else target[begin : begin + count]

    def put_tensor(
        self, read: Read, offset: int, source: torch.Tensor, *, non_blocking: bool = False
    ) -> None:
        """Put the bytes `source` (flat, uint8), which start and end at whole elements.

        Args:
            non_blocking: may return before a GPU has copied from `source` in host memory.
        """
        target, stored = self._carried(read.wanted)
        elements = source.view(stored)
        first = read.stored.start + offset // stored.itemsize
        run = read.stored._replace(start=first, end=first + elements.numel())
        wanted = Run.of(self._pieces[read.wanted])
        for shape, here, steps, there, target_steps in regions(run, wanted):
            torch.as_strided(target, shape, target_steps, target.storage_offset() + there).copy_(
                torch.as_strided(elements, shape, steps, elements.storage_offset() + here),
                non_blocking=non_blocking,
            )

    def _carried(self, wanted: int) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor of piece `wanted` and the type of what is put there."""
        piece, tensor = self._pieces[wanted], self._tensors[wanted]
        if is_rounded(piece, tensor):
            return tensor, torch.float32
        carrier = _CARRIER[itemsize(piece.dtype)]
        return tensor.view(carrier), carrier

    def zero(self, wanted: int) -> None:
        """Fill the tensor of piece `wanted` with zeros."""
        self._carried(wanted)[0].zero_()
