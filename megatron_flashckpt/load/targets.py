"""The tensors that a load fills."""

from __future__ import annotations

import torch

from megatron_flashckpt.layout.dtypes import itemsize
from megatron_flashckpt.layout.piece import Piece
from megatron_flashckpt.layout.read_plan import Read
from megatron_flashckpt.layout.reshard import Run, regions
from megatron_flashckpt.load.chunk_reader import Part
from megatron_flashckpt.load.gpu_buffers import Gpu
from megatron_flashckpt.megatron_lm.torch_dtypes import torch_dtype

#: Integer types by element size, which move elements bit by bit, independent of their type.
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Float types for which a copy to the same type is also bit-exact.
_FLOATS = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))


def is_converted(dtype: str, tensor: torch.Tensor) -> bool:
    """Return whether stored elements of type `dtype` are converted for `tensor`.

    Rounding is to nearest, ties to even, as `optimizer.step()` derives weights from masters.
    """
    stored = torch_dtype(dtype)
    return stored != tensor.dtype and {stored, tensor.dtype} <= _FLOATS


class Targets:
    """The flat tensors of the requested pieces, filled from runs of any other sharding.

    The training thread creates the object; several threads may put different elements.

    Args:
        pieces: the requested pieces.
        tensors: for each piece, a flat tensor of its elements (or of its bytes). A piece of floats
            may have a tensor of another type of floats, to which its elements are converted.
    """

    def __init__(self, pieces: list[Piece], tensors: list[torch.Tensor]) -> None:
        self._pieces = pieces
        self._tensors = tensors
        #: By piece, what `_host_bytes` has returned. Chunks are many more than pieces.
        self._memory: dict[int, memoryview | None] = {}
        self.gpu = Gpu.of(tensors)
        """GPU that the load fills; None if all tensors are in host memory."""

    def place(self, read: Read, offset: int, nbytes: int) -> memoryview | None:
        """Return the destination of `nbytes` bytes of `read` from byte `offset` on.

        Returns None if these bytes need a conversion, go to several places, or if their
        destination is not contiguous host memory.
        """
        memory = self._host_bytes(read.wanted)
        if memory is None:
            return None
        piece = self._pieces[read.wanted]
        size = itemsize(piece.dtype)
        first = read.stored.start + offset // size
        run = read.stored._replace(start=first, end=first + nbytes // size)
        parts = regions(run, Run.of(piece))
        if len(parts) != 1 or not parts[0].gapless or parts[0].shape != (nbytes // size,):
            return None
        begin = parts[0].target_start * size
        return memory[begin : begin + nbytes]

    def _host_bytes(self, wanted: int) -> memoryview | None:
        """Return the memory of piece `wanted`.

        Returns None if its elements are converted, or do not lie in contiguous host memory.
        """
        if wanted not in self._memory:
            target, carrier = self._carried(wanted)
            is_placed = target.dtype == carrier and target.is_cpu and target.is_contiguous()
            self._memory[wanted] = target.view(torch.uint8).numpy().data if is_placed else None
        return self._memory[wanted]

    def put(self, parts: list[Part]) -> None:
        """Copy parts of a chunk into the tensors.

        If the layout is unchanged, most parts need no conversion. One call copies all of these, in
        a quarter of the time of one call per part. For a GPU, enqueue all copies of a chunk, then
        wait once, because the caller reads the next chunk into the same buffer.
        """
        try:
            self.enqueue(parts)
        finally:
            if self.gpu is not None:
                self.gpu.synchronize()

    def enqueue(self, parts: list[Part]) -> None:
        """Copy parts as `put` does. A GPU may still read the sources when this returns."""
        non_blocking = self.gpu is not None
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for part in parts:
            read, offset, source = part
            target = self._in_same_box(read, offset, source.nbytes)
            if target is None:
                content = torch.frombuffer(source, dtype=torch.uint8)
                self.put_tensor(read, offset, content, non_blocking=non_blocking)
            else:
                targets.append(target)
                sources.append(torch.frombuffer(source, dtype=target.dtype))
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)

    def _in_same_box(self, read: Read, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return the contiguous elements that take `nbytes` bytes of `read` from `offset` on.

        Returns None if the stored box differs from the requested one, or the type is converted.
        """
        piece, target, stored = self._pieces[read.wanted], self._tensors[read.wanted], read.stored
        if stored.offset != piece.offset or stored.shape != piece.shape:
            return None
        if target.dtype not in _FLOATS or target.itemsize != itemsize(piece.dtype):
            return None
        if is_converted(piece.dtype, target):
            return None
        begin = stored.start - piece.start + offset // target.itemsize
        count = nbytes // target.itemsize
        return target if count == target.numel() else target[begin : begin + count]

    def put_tensor(
        self, read: Read, offset: int, source: torch.Tensor, *, non_blocking: bool = False
    ) -> None:
        """Copy the bytes `source` (flat, uint8) of whole elements to their destination.

        Args:
            non_blocking: True to return before a GPU has copied from `source` in host memory.
        """
        target, stored = self._carried(read.wanted)
        elements = source.view(stored)
        first = read.stored.start + offset // stored.itemsize
        run = read.stored._replace(start=first, end=first + elements.numel())
        wanted = Run.of(self._pieces[read.wanted])
        for shape, start, steps, target_start, target_steps in regions(run, wanted):
            target_offset = target.storage_offset() + target_start
            torch.as_strided(target, shape, target_steps, target_offset).copy_(
                torch.as_strided(elements, shape, steps, elements.storage_offset() + start),
                non_blocking=non_blocking,
            )

    def _carried(self, wanted: int) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor of piece `wanted`, and the element type to copy into it."""
        piece, tensor = self._pieces[wanted], self._tensors[wanted]
        if is_converted(piece.dtype, tensor):
            return tensor, torch_dtype(piece.dtype)
        carrier = _CARRIER[itemsize(piece.dtype)]
        return tensor.view(carrier), carrier

    def zero(self, wanted: int) -> None:
        """Fill the tensor of piece `wanted` with zeros."""
        self._carried(wanted)[0].zero_()
