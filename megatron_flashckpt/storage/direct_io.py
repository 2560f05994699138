"""Whether large writes go past the page cache (O_DIRECT): learnt per file system, not assumed.

On a local disk it is the faster way and the cheaper one: 265 MB per rank, two ranks, ext4 on a
virtual disk, cores shared with other jobs: 0.17 CPU seconds per GB, digests included, where the
page cache took 1.0 at a third of the speed (`scripts/bench persist --direct-io always never`). Some
file systems refuse it (tmpfs before Linux 6.6, some network and stacked ones); on others each such
write waits for a server. So the first large chunks are written in turn with it and without it, each
made durable and timed, and the better way is kept. These are chunks that have to be written anyhow:
a probe costs no file and no byte of its own.
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

#: What offset, address and size of a direct write must be multiples of. Devices want 512 or 4096,
#: Lustre the page of the machine, which is 64 KiB on some aarch64 hosts (Grace). Nor must a page of
#: the cache hold bytes that are written directly as well.
ALIGNMENT = max(4096, mmap.PAGESIZE)
#: Smaller writes say nothing of bandwidth.
_TRIAL_NBYTES = 1024 * 1024
#: Chunks that are written either way before one of the ways is chosen.
_TRIALS = 6
#: How much longer a direct write may take: it spares a copy, and the cache of the data loader.
_MARGIN = 1.5

DirectMode = Literal["auto", "always", "never"]


def is_aligned(offset: int, view: memoryview) -> bool:
    """Return whether `view`, but for its end, can be written directly at `offset`.

    Memory that is read-only, as that of `bytes`, counts as not aligned.
    """
    if offset % ALIGNMENT or view.nbytes < ALIGNMENT or view.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT == 0


class FileSystem:
    """What is known of one file system. May be used from several threads."""

    def __init__(self, name: str, mode: DirectMode) -> None:
        self._name = name
        #: None: not decided.
        self._direct: bool | None = {"auto": None, "always": True, "never": False}[mode]
        self._trying = threading.Lock()
        self._took_s: dict[bool, list[float]] = {True: [], False: []}

    def open(self, path: Path) -> int:
        """Return a descriptor for direct writes to the file at `path`; -1: write as ever."""
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
        """Write nothing directly any more."""
        self._direct = False
        logger.info("%s: refuses O_DIRECT, so writes go through the page cache", self._name)

    @contextlib.contextmanager
    def turn(self, fd: int, nbytes: int) -> Iterator[bool]:
        """Yield whether to write `nbytes` directly; while that is not decided, time the write.

        Args:
            fd: any descriptor of the file, to make durable what is timed.
        """
        if self._direct is not None or nbytes < _TRIAL_NBYTES:
            yield self._direct is not False
        elif not self._trying.acquire(blocking=False):
            yield True  # one at a time is timed; the others keep storage as busy as it will be
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
        direct, buffered = (statistics.median(self._took_s[way]) for way in (True, False))
        self._direct = direct <= _MARGIN * buffered
        logger.info(
            "%s: %.0f MiB/s with O_DIRECT, %.0f MiB/s through the page cache; writing %s it",
            self._name,
            *(1 / took / 2**20 for took in (direct, buffered)),
            "past" if self._direct else "through",
        )


class DirectIo:
    """What is known of the file systems that one process writes to."""

    def __init__(self, mode: DirectMode) -> None:
        self._mode = mode
        self._lock = threading.Lock()
        self._known: dict[int, FileSystem] = {}

    def of(self, fd: int, path: Path) -> FileSystem:
        """Return what is known of the file system of the file `fd`, which is at `path`."""
        device = os.fstat(fd).st_dev
        with self._lock:
            if device not in self._known:
                name = f"file system {os.major(device)}:{os.minor(device)} at {path.parent}"
                self._known[device] = FileSystem(name, self._mode)
            return self._known[device]


#: For whoever does not write checkpoints: everything goes through the page cache.
NEVER = DirectIo("never")
