"""The memory of one simulated device, given out as torch's caching allocator does.

Rules (`c10/cuda/CUDACachingAllocator.cpp`, torch docs "Memory management" and
`Tensor.record_stream`): memory that a tensor lets go of is given to the next one at once, although
work that uses it may still be queued; the order of one stream makes that safe. After
`record_stream` it is given out again only when what that stream was asked for by then is done.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

_ALIGN = 512


class Block:
    """A piece of device memory that is given back when the last tensor on it goes."""

    def __init__(self, allocator: Allocator, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.awaited: list[Callable[[], threading.Event]] = []
        """One per stream of `record_stream`: marks what that stream is asked for until then."""
        weakref.finalize(self, allocator.give_back, offset, nbytes, self.awaited).atexit = False


class Allocator:
    """First fit; of several free pieces the one that was freed last."""

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._lock = threading.RLock()  # a finalizer may run inside `allocate`
        self._free = [(0, nbytes)]
        self._awaited: list[tuple[int, int, list[threading.Event]]] = []
        self.nbytes = nbytes
        self.allocated = 0
        self.peak = 0

    def allocate(self, nbytes: int) -> tuple[Block, torch.Tensor]:
        """Return a block and its bytes, which hold what was there before.

        Raises:
            OutOfMemoryError: no free piece is large enough.
        """
        wanted = -(-max(nbytes, 1) // _ALIGN) * _ALIGN
        with self._lock:
            self._collect()
            for place, (offset, size) in enumerate(self._free):
                if size >= wanted:
                    self._free[place] = (offset + wanted, size - wanted)
                    self.allocated += wanted
                    self.peak = max(self.peak, self.allocated)
                    return Block(self, offset, wanted), self._memory[offset : offset + nbytes]
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes.")

    def give_back(
        self, offset: int, nbytes: int, awaited: list[Callable[[], threading.Event]]
    ) -> None:
        with self._lock:
            self.allocated -= nbytes
            if awaited:
                self._awaited.append((offset, nbytes, [mark() for mark in awaited]))
            else:
                self._free.insert(0, (offset, nbytes))

    def _collect(self) -> None:
        for entry in list(self._awaited):
            if all(mark.is_set() for mark in entry[2]):
                self._awaited.remove(entry)
                self._free.insert(0, entry[:2])
