"""Memory that other slabs of this machine are about to take and the kernel does not count yet.

A slab announces its size by the length of its memfd before it takes its first page. Until all pages
are allocated, other processes that check for memory add the missing bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
#: Prefix of the names that `mapping.create_memory` gives to memfds, in /proc.
_NAME = "/memfd:flashckpt-"
_BLOCK_NBYTES = 512


def announced(own: int) -> dict[str, int]:
    """Return per rank the bytes that slabs of this user will still take, except memfd `own`.

    Slabs of containers with their own process namespace are not visible.
    """
    slabs = {slab.identity: slab for slab in slab_descriptors()}  # several processes hold each
    slabs.pop(_identity(os.fstat(own)), None)
    missing: dict[str, int] = {}
    for slab in slabs.values():
        if slab.missing_nbytes > 0:
            missing[slab.rank] = missing.get(slab.rank, 0) + slab.missing_nbytes
    return missing


class SlabDescriptor(NamedTuple):
    """A descriptor by which a process of this user holds a slab."""

    pid: int
    path: str
    """In /proc; opening it opens the memfd once more."""
    rank: str
    identity: tuple[int, int]
    """Equal for all descriptors of one slab."""
    missing_nbytes: int
    """Bytes that are not allocated yet."""


def slab_descriptors() -> Iterator[SlabDescriptor]:
    """Return the slab descriptors of all visible processes of this user. Never raises."""
    for process in _PROC.iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            for fd in os.scandir(process / "fd"):
                with contextlib.suppress(OSError):
                    name = os.readlink(fd.path)
                    if not name.startswith(_NAME):
                        continue
                    status = os.stat(fd.path)
                    yield SlabDescriptor(
                        int(process.name),
                        fd.path,
                        name[len(_NAME) :].removesuffix(" (deleted)"),
                        _identity(status),
                        status.st_size - _BLOCK_NBYTES * status.st_blocks,
                    )


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
