"""The choice between O_DIRECT and the page cache for large writes, measured per file system.

On a local disk, O_DIRECT is faster. It takes 0.17 CPU seconds per GB with digests, instead of 1.0
through the page cache (`scripts/bench persist --direct-io always never`).
Some file systems refuse O_DIRECT (tmpfs before Linux 6.6, some network and stacked ones); on others
every such write waits for a server. So the first large chunks are written alternately with O_DIRECT
and through the page cache. Each of these writes is made durable and timed, and the faster way is
kept. The trial writes no extra file and no extra byte, because these chunks have to be written
anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from megatron_flashckpt.error_classes import is_unsupported

logger = logging.getLogger(__name__)

#: Offset, address and size of a direct write are multiples of this. Devices require 512 or 4096,
#: Lustre the page size of the machine, which is 64 KiB on some aarch64 hosts (Grace). One page of
#: the cache must not mix bytes written directly with bytes written through the cache.
ALIGNMENT = max(4096, mmap.PAGESIZE)
#: Smaller writes do not measure bandwidth.
_TRIAL_NBYTES = 1024 * 1024
#: Chunks written each way before one way is chosen.
_TRIALS = 6
#: Direct writes are chosen if they take at most this multiple of the other time. They save a copy
#: and leave the page cache to the data loader.
_MARGIN = 1.5

DirectMode = Literal["auto", "always", "never"]


def is_aligned(offset: int, view: memoryview) -> bool:
    """Return whether the whole pages of `view` can be written directly at `offset`.

    Read-only memory, such as that of `bytes`, counts as unaligned.
    """
    if offset % ALIGNMENT or view.nbytes < ALIGNMENT or view.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT == 0


class FileSystem:
    """Measurements and choice for one file system. May be used from several threads."""

    def __init__(self, name: str, mode: DirectMode) -> None:
        self._name = name
        #: None until the trial has ended.
        self._direct: bool | None = {"auto": None, "always": True, "never": False}[mode]
        self._trying = threading.Lock()
        self._took_s: dict[bool, list[float]] = {True: [], False: []}

    def open(self, path: Path) -> int:
        """Return a descriptor for direct writes to the file at `path`; -1: use the page cache."""
        if self._direct is False:
            return -1
        try:
            return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if not is_unsupported(error):
                raise
            self.refused()
            return -1

    def refused(self) -> None:
        """Use the page cache for all further writes."""
        self._direct = False
        logger.info("%s: refuses O_DIRECT, so all writes go through the page cache", self._name)

    @contextlib.contextmanager
    def timed_write(self, fd: int, nbytes: int) -> Iterator[bool]:
        """Yield whether to write `nbytes` directly; during the trial, time the write.

        Args:
            fd: any descriptor of the file, for the fdatasync that belongs to a timed write.
        """
        if self._direct is not None or nbytes < _TRIAL_NBYTES:
            yield self._direct is not False
        elif not self._trying.acquire(blocking=False):
            yield True  # one write at a time is timed, under the load of all the others
        else:
            try:
                direct = len(self._took_s[True]) <= len(self._took_s[False])
                started = time.perf_counter()
                yield direct
                os.fdatasync(fd)
                self._took_s[direct].append((time.perf_counter() - started) / nbytes)
                self._decide()
            finally:
                self._trying.release()

    def _decide(self) -> None:
        if self._direct is not None or min(map(len, self._took_s.values())) < _TRIALS:
            return
        direct, buffered = (
            statistics.median(self._took_s[is_direct]) for is_direct in (True, False)
        )
        self._direct = direct <= _MARGIN * buffered
        logger.info(
            "%s: %.0f MiB/s with O_DIRECT, %.0f MiB/s through the page cache; further writes use "
            "%s",
            self._name,
            *(1 / took / 2**20 for took in (direct, buffered)),
            "O_DIRECT" if self._direct else "the page cache",
        )


class DirectIo:
    """The file systems that one process writes to, by device number."""

    def __init__(self, mode: DirectMode) -> None:
        self._mode = mode
        self._lock = threading.Lock()
        self._known: dict[int, FileSystem] = {}

    def of(self, fd: int, path: Path) -> FileSystem:
        """Return the `FileSystem` of the file `fd`, which is at `path`."""
        device = os.fstat(fd).st_dev
        with self._lock:
            if device not in self._known:
                name = f"file system {os.major(device)}:{os.minor(device)} at {path.parent}"
                self._known[device] = FileSystem(name, self._mode)
            return self._known[device]


#: For processes that write no checkpoints: all writes go through the page cache.
NEVER = DirectIo("never")
