"""Memory that other slabs of this machine are about to take and the kernel does not count yet.

A slab announces its size by the length of its memfd before it takes its first page. Until all pages
are allocated, other processes that check for memory add the missing bytes.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_PROC = Path("/proc")
#: Prefix of the names that `mapping.create_memory` gives to memfds, in /proc.
_NAME = "/memfd:flashckpt-"
_BLOCK_NBYTES = 512


def announced(own: int, proc: Path = _PROC) -> dict[str, int]:
    """Return per rank the bytes that slabs of this user will still take, except memfd `own`.

    Slabs of containers with their own process namespace are not visible.
    """
    counted = {_identity(os.fstat(own))}
    missing: dict[str, int] = {}
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            for fd in os.scandir(process / "fd"):
                with contextlib.suppress(OSError):
                    name = os.readlink(fd.path)
                    if not name.startswith(_NAME):
                        continue
                    status = os.stat(fd.path)
                    if _identity(status) not in counted:
                        counted.add(_identity(status))
                        left = status.st_size - _BLOCK_NBYTES * status.st_blocks
                        rank = name[len(_NAME) :].removesuffix(" (deleted)")
                        if left > 0:
                            missing[rank] = missing.get(rank, 0) + left
    return missing


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
