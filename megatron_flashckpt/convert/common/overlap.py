"""Refuse a destination that shares files with the source, whatever the two are called.

Paths are compared by device and inode, with symbolic links resolved. A bind mount shows the same
directories under other parents, so the kernel's mount table is read as well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megatron_flashckpt.errors import ConfigError

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")


class _Place(NamedTuple):
    """A directory as its file system names it, wherever that file system is mounted."""

    device: str
    path: PurePosixPath


class _Mount(NamedTuple):
    point: Path
    root: _Place
    """Directory of the file system that is seen at `point`."""


def refuse_overlap(root: Path, checkpoint: Path, destination: Path) -> None:
    """Return if nothing that is written or replaced in `destination` can be part of the source.

    Args:
        root: the save directory that is converted from.
        checkpoint: the directory of the iteration in `root`; may be a link that leads elsewhere.

    Raises:
        ConfigError: `destination` is a directory of the source, contains it or lies in it.
    """
    links = (path for path in checkpoint.rglob("*") if path.is_symlink())
    for source in (root, checkpoint, *links):
        relation = _relation(destination.resolve(), source.resolve())
        if relation is not None:
            raise ConfigError(
                f"{destination}: {relation} {source}, which is converted; nothing was changed; "
                "name a destination apart from the source"
            )


def _relation(destination: Path, source: Path) -> str | None:
    """Return how `destination` and `source` overlap, or None. Both are resolved."""
    if _same(destination, source):
        return "is the same directory as"
    mounts = list(_mounts())
    if any(_same(parent, destination) for parent in source.parents) or _holds(
        mounts, destination, source
    ):
        return "contains"
    if any(_same(parent, source) for parent in destination.parents) or _holds(
        mounts, source, destination
    ):
        return "lies in"
    return None


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return one == other  # what does not exist is nothing else under another name


def _holds(mounts: list[_Mount], outer: Path, inner: Path) -> bool:
    """Return whether `inner` is `outer`, or in it, as the mount table tells."""
    place = _place(mounts, inner)
    if place is None:
        return False
    own = _place(mounts, outer)
    below = [mount.root for mount in mounts if mount.point.is_relative_to(outer)]
    return any(
        it.device == place.device and place.path.is_relative_to(it.path)
        for it in [*([own] if own is not None else []), *below]
    )


def _place(mounts: list[_Mount], path: Path) -> _Place | None:
    # Of several mounts at one point the last one is seen.
    over = [mount for mount in mounts if path.is_relative_to(mount.point)]
    if not over:
        return None
    deepest = max(range(len(over)), key=lambda n: (len(over[n].point.parts), n))
    mount = over[deepest]
    return _Place(mount.root.device, mount.root.path / path.relative_to(mount.point))


def _mounts() -> Iterator[_Mount]:
    """Yield what /proc/self/mountinfo lists; nothing where there is no such file."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(" ")
        if len(fields) > 4:
            root, point = (_ESCAPED.sub(lambda it: chr(int(it[1], 8)), it) for it in fields[3:5])
            yield _Mount(Path(point), _Place(fields[2], PurePosixPath(root)))
