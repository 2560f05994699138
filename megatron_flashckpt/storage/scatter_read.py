"""Reads bytes of a file into several pieces of memory, without an intermediate copy."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

#: Bytes per read. A digest that follows finds them in the processor's cache, so reading and
#: digesting take as long as a plain copy. With 4 MiB they take 1.5 times as long.
BLOCK_NBYTES = 2**20
#: Pieces of memory that one call fills; Linux accepts 1024.
_MAX_PARTS = 1000

Seen = Callable[[memoryview], object]


class OpenFile:
    """A file descriptor that is closed with the last reference to this object."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class KeptFiles:
    """The files that were read last, kept open for the next read. Used by several threads.

    The kernel reads ahead only within one stream. With a new descriptor per 4 MiB it has to detect
    the stream again each time: reading 256 MiB that were in no cache took a tenth longer.
    POSIX_FADV_WILLNEED for the first 64 MiB made loads slower, because it fills the cache with
    small pages.
    """

    #: Kept files; a load reads one file after the other, with a few threads.
    _MOST = 4

    def __init__(self) -> None:
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str, opened: Callable[[], int]) -> OpenFile:
        """Return the file `name`; if it is not kept, open it by calling `opened`."""
        with self._lock:
            if name not in self._files:
                self._files[name] = OpenFile(opened())
                if len(self._files) > self._MOST:
                    self._files.popitem(last=False)
            self._files.move_to_end(name)
            return self._files[name]

    def drop(self, name: str) -> None:
        """Forget the file `name`, so that the next read opens it again."""
        with self._lock:
            self._files.pop(name, None)


def read_parts(fd: int, offset: int, parts: Sequence[memoryview], seen: Seen | None = None) -> int:
    """Fill `parts`, end to end, from byte `offset` of the file `fd`; return the bytes read.

    The number is smaller than that of `parts` only at the end of the file.

    Args:
        parts: writable, of bytes.
        seen: called with all bytes read, in order, while they are in the processor's cache.
    """
    filled = 0
    # With a cache full of data, the processor runs this loop slowly: every step counts.
    for block, wanted in _blocks(parts):
        got = os.preadv(fd, block, offset + filled)
        if got == wanted:
            filled += got
            if seen is not None:
                for part in block:
                    seen(part)
            continue
        while got < wanted and (more := os.preadv(fd, cut(block, got), offset + filled + got)):
            got += more
        if seen is not None:
            for part in cut(block, 0, got):
                seen(part)
        filled += got
        if got < wanted:
            break
    return filled


def _blocks(parts: Sequence[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    """Yield `parts`, cut into blocks, with the length of each block in bytes."""
    block: list[memoryview] = []
    room = BLOCK_NBYTES
    for part in parts:
        start, end = 0, part.nbytes
        while start < end:
            stop = min(start + room, end)
            block.append(part[start:stop])
            room -= stop - start
            start = stop
            if not room or len(block) == _MAX_PARTS:
                yield block, BLOCK_NBYTES - room
                block, room = [], BLOCK_NBYTES
    if block:
        yield block, BLOCK_NBYTES - room


def cut(block: Sequence[memoryview], low: int, high: int | None = None) -> list[memoryview]:
    """Return bytes `[low, high)` of a block."""
    pieces = []
    for part in block:
        piece = part[max(low, 0) : None if high is None else max(high, 0)]
        if piece.nbytes:
            pieces.append(piece)
        low -= part.nbytes
        high = None if high is None else high - part.nbytes
    return pieces
