"""Bytes of a file into pieces of memory, without a copy in between."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

#: What is read at a time. A digest that comes next finds it in the processor's cache: 1 MiB read
#: from memory and digested took what a plain copy takes, 4 MiB half as long again. 512 KiB
#: took an AMD processor a tenth longer than 1 MiB, for the steps in between; an Intel one a
#: fifteenth less.
BLOCK_NBYTES = 2**20
#: Pieces of memory that one call fills; Linux takes 1024.
_MAX_PARTS = 1000

Seen = Callable[[memoryview], object]


class OpenFile:
    """A file descriptor that is closed when nobody holds this any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class KeptFiles:
    """The files that were read last, open for the next read of them. Used by several threads.

    A kernel reads ahead for as long as it sees one stream. With a new descriptor for every 4 MiB it
    has to find that out again each time: 256 MiB that were in no cache took a tenth longer and a
    quarter more CPU time. To ask for the first 64 MiB (POSIX_FADV_WILLNEED) while the load was
    planned made it slower: what that brings lies in small pages.
    """

    #: A load reads file after file, with a few threads.
    _MOST = 4

    def __init__(self) -> None:
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str, opened: Callable[[], int]) -> OpenFile:
        """Return the file `name`; if it is not kept, with the descriptor that `opened` returns."""
        with self._lock:
            if name not in self._files:
                self._files[name] = OpenFile(opened())
                if len(self._files) > self._MOST:
                    self._files.popitem(last=False)
            self._files.move_to_end(name)
            return self._files[name]

    def drop(self, name: str) -> None:
        """Have the next read open the file `name` again, by its name."""
        with self._lock:
            self._files.pop(name, None)


def read_parts(fd: int, offset: int, parts: Sequence[memoryview], seen: Seen | None = None) -> int:
    """Fill `parts`, end to end, from byte `offset` of the file `fd`; return the bytes read.

    They are fewer only at the end of the file.

    Args:
        parts: writable, of bytes.
        seen: called with all that is read, in order, while it is in the processor's cache.
    """
    filled = 0
    # A processor whose cache has just been filled with data runs this slowly: every step counts.
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
    """Yield `parts` cut into blocks, and the length of each."""
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
    found = []
    for part in block:
        piece = part[max(low, 0) : None if high is None else max(high, 0)]
        if piece.nbytes:
            found.append(piece)
        low -= part.nbytes
        high = None if high is None else high - part.nbytes
    return found
