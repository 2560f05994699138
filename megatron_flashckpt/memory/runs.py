"""Groups the copies of a save into runs of one torch call each.

Nearly all pieces of one kind are adjacent in a slot. Copying 20,000 pieces one by one takes twice
as long as their bytes, and one call for many pieces releases the interpreter lock throughout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import msgspec
import torch

from megatron_flashckpt.memory.pinned_slab import CHUNK_NBYTES

#: On a CPU, adjacent pieces of at least this average size are copied one by one; smaller ones are
#: concatenated first. (One by one, pieces of 4 KiB take 4.6 times one plain copy of all.)
_LARGE = 256 * 1024


class Copy(msgspec.Struct, frozen=True, gc=False):
    """The places of a piece among the tensors of a save, and in the save's slot."""

    source: int
    """Number of the tensor; it is flat, on any device."""
    offset: int
    """Bytes from the start of the save's data."""
    start: int = 0
    end: int | None = None
    """The half-open range of the piece's elements in the tensor; None: up to its end."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Adjacent pieces of one element type, and their bytes in the slab."""

    target: torch.Tensor
    sources: list[torch.Tensor]
    is_pinned: bool

    @property
    def nbytes(self) -> int:
        return self.target.nbytes

    def copy_on_host(self) -> None:
        if self.target.nbytes < _LARGE * len(self.sources):
            torch.cat(self.sources, out=self.target)
        else:
            torch._foreach_copy_(self._targets(), self.sources)

    def copy_from_device(self) -> None:
        """Copy on the current stream; asynchronously if the target is page-locked."""
        torch._foreach_copy_(self._targets(), self.sources, non_blocking=self.is_pinned)

    def keep_memory(self, stream: torch.cuda.Stream) -> None:
        """Keep the allocator from reusing the sources' memory before `stream` has read it.

        The job holds the tensors, but training may free their memory (`storage().resize_(0)`).
        """
        for source in self.sources:
            if source.is_cuda:
                source.record_stream(stream)

    def _targets(self) -> tuple[torch.Tensor, ...]:
        return self.target.split_with_sizes([source.numel() for source in self.sources])


def runs(
    copies: list[Copy],
    tensors: list[torch.Tensor],
    data_offset: int,
    slab: torch.Tensor,
    is_pinned: Callable[[int], bool],
    most_nbytes: int,
) -> Iterator[Run]:
    """Yield runs of adjacent pieces of one element type, of at most `most_nbytes` bytes.

    Args:
        data_offset: bytes from the start of the slab to the save's data.
        slab: all bytes of the slab, flat uint8.
        is_pinned: returns whether all bytes of the slab below an offset are page-locked.
    """

    def run(begin: int, end: int, sources: list[torch.Tensor]) -> Run:
        return Run(slab[begin:end].view(sources[0].dtype), sources, is_pinned(end))

    begin = end = 0
    sources: list[torch.Tensor] = []
    for source, offset in _pieces(_joined(copies, tensors, data_offset), most_nbytes):
        if sources and (
            offset != end
            or source.dtype != sources[0].dtype
            or end + source.nbytes - begin > most_nbytes
        ):
            yield run(begin, end, sources)
            sources = []
        if not sources:
            begin = offset
        sources.append(source)
        end = offset + source.nbytes
    if sources:
        yield run(begin, end, sources)


def _pieces(
    joined: Iterator[tuple[torch.Tensor, int]], most_nbytes: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield sources and offsets, cut at borders of page-locked chunks and at `most_nbytes`.

    CUDA does not document copies across two registrations of page-locked memory.
    """
    for source, offset in joined:
        while True:
            nbytes = min(source.nbytes, most_nbytes, CHUNK_NBYTES - offset % CHUNK_NBYTES)
            if nbytes == source.nbytes:
                yield source, offset
                break
            numel = nbytes // source.itemsize
            yield source[:numel], offset
            source, offset = source[numel:], offset + nbytes


def _joined(
    copies: list[Copy], tensors: list[torch.Tensor], data_offset: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield sources, and offsets in the slab.

    Pieces that follow each other in both memories are one source.
    Nearly every tensor with several pieces (both halves of SwiGLU's fc1) is copied whole, without
    views of its pieces.
    """
    rest = iter(copies)
    copy = next(rest, None)
    while copy is not None:
        number, offset, start, end = copy.source, copy.offset, copy.start, copy.end
        source = tensors[number]
        copy = next(rest, None)
        if end is None:
            yield source, data_offset + offset
            continue
        while (
            copy is not None
            and copy.source == number
            and copy.start == end
            and copy.end is not None
            and copy.offset == offset + (end - start) * source.itemsize
        ):
            end = copy.end
            copy = next(rest, None)
        yield source if end - start == source.numel() else source[start:end], data_offset + offset
