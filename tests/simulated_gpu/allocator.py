"""Memory of one simulated device, allocated as by torch's caching allocator.

Rules (`c10/cuda/CUDACachingAllocator.cpp`, torch docs "Memory management" and
`Tensor.record_stream`): freed memory goes to the next tensor of the same stream at once. Work that
uses the memory may still be queued, but the order of the stream makes that safe. After
`record_stream` memory is reused only when the work that this stream had queued at the free is done.
Memory of one stream goes to another stream only if no other memory is left, and after all work of
the device. The driver gets memory back only by `release`.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.simulated_gpu.node import Stream

_ALIGN = 512


@dataclasses.dataclass(frozen=True, eq=False)
class _Piece:
    offset: int
    nbytes: int
    stream: Stream | None
    """Stream that used the memory last; None if torch has given it back to the driver."""
    awaited: tuple[threading.Event, ...] = ()


class Block:
    """Piece of device memory that is freed with the last tensor in it."""

    def __init__(
        self, allocator: Allocator, offset: int, nbytes: int, stream: Stream | None
    ) -> None:
        self._stream = stream
        self._awaited: list[Stream] = []
        arguments = (offset, nbytes, stream, self._awaited)
        weakref.finalize(self, allocator.give_back, *arguments).atexit = False

    def record_stream(self, stream: Stream) -> None:
        """Free the memory only after the work that `stream` has queued when this block ends."""
        if stream is not self._stream and stream not in self._awaited:
            self._awaited.append(stream)


class Allocator:
    """Allocator that takes the piece that was freed last, of those that are large enough."""

    def __init__(self, nbytes: int, drain: Callable[[], None]) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._drain = drain
        self._lock = threading.Lock()
        self._returned: collections.deque[_Piece] = collections.deque()
        """A finalizer may run inside any other call, so it takes no lock and only adds here."""
        self._free = [_Piece(0, nbytes, None)]
        self._waiting: list[_Piece] = []
        self._allocated = 0
        self.nbytes = nbytes
        self.peak = 0

    @property
    def allocated(self) -> int:
        with self._lock:
            self._collect()
            return self._allocated

    def allocate(self, nbytes: int, stream: Stream) -> tuple[Block, torch.Tensor]:
        """Return a block for work on `stream`, and its bytes with their former contents."""
        wanted = -(-max(nbytes, 1) // _ALIGN) * _ALIGN
        offset = self._take(wanted, stream)
        if offset is None:
            self.release()
            offset = self._take(wanted, stream)
        if offset is None:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes.")
        return Block(self, offset, wanted, stream), self._memory[offset : offset + nbytes]

    def allocate_outside(self, nbytes: int) -> Block:
        """Return memory that a library other than torch requests from the driver."""
        wanted = -(-nbytes // _ALIGN) * _ALIGN
        offset = self._take(wanted, None)
        if offset is None:
            raise torch.OutOfMemoryError(f"cudaMalloc of {nbytes} bytes: out of memory")
        return Block(self, offset, wanted, None)

    @property
    def unreserved(self) -> int:
        """Bytes of the driver: neither in tensors nor cached by torch."""
        with self._lock:
            self._collect()
            return sum(piece.nbytes for piece in self._free if piece.stream is None)

    def release(self) -> None:
        """Give all memory without a tensor to the driver, after all work of the device."""
        with self._lock:
            self._collect()
            idle_soon = {*self._free, *self._waiting}
        self._drain()
        self._merge(idle_soon)

    def give_back(
        self, offset: int, nbytes: int, stream: Stream | None, awaited: list[Stream]
    ) -> None:
        marks = tuple(other.mark() for other in awaited)
        self._returned.append(_Piece(offset, nbytes, stream, marks))

    def _take(self, wanted: int, stream: Stream | None) -> int | None:
        with self._lock:
            self._collect()
            for place, piece in enumerate(self._free):
                if piece.nbytes >= wanted and piece.stream in (None, stream):
                    rest = _Piece(piece.offset + wanted, piece.nbytes - wanted, piece.stream)
                    self._free[place : place + 1] = [rest] if rest.nbytes else []
                    self._allocated += wanted
                    self.peak = max(self.peak, self._allocated)
                    return piece.offset
        return None

    def _collect(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._allocated -= piece.nbytes
            self._waiting.append(piece)
        for piece in list(self._waiting):
            if all(mark.is_set() for mark in piece.awaited):
                self._waiting.remove(piece)
                self._free.insert(0, piece)

    def _merge(self, idle: set[_Piece]) -> None:
        """Join adjacent free pieces that no work uses; any stream may use them then."""
        with self._lock:
            self._collect()
            merged: list[_Piece] = []
            for piece in sorted(idle.intersection(self._free), key=lambda piece: piece.offset):
                begin, nbytes = piece.offset, piece.nbytes
                if merged and merged[-1].offset + merged[-1].nbytes == begin:
                    last = merged.pop()
                    begin, nbytes = last.offset, last.nbytes + nbytes
                merged.append(_Piece(begin, nbytes, None))
            self._free = [piece for piece in self._free if piece not in idle] + merged
