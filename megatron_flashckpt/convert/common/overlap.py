"""Refusal of a destination that shares files with the source, under any path.

Paths are compared by device and inode, with symbolic links resolved. A bind mount shows the same
directories under other parents, so the kernel's mount table is read too.
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
    """A directory by its device and its path on that device, independent of mount points."""

    device: str
    path: PurePosixPath


class _Mount(NamedTuple):
    point: Path
    root: _Place
    """Directory that is mounted at `point`."""


def refuse_overlap(root: Path, checkpoint: Path, destination: Path) -> None:
    """Raise if a write to `destination` could change the source.

    Args:
        root: save directory of the source.
        checkpoint: directory of the iteration in `root`; may be a symbolic link.

    Raises:
        ConfigError: `destination` is a directory of the source, contains one or lies in one.
    """
    links = (path for path in checkpoint.rglob("*") if path.is_symlink())
    for source in (root, checkpoint, *links):
        # A link may lead to itself, which `Path.resolve` raises as a RuntimeError.
        relation = _relation(Path(os.path.realpath(destination)), Path(os.path.realpath(source)))
        if relation is not None:
            raise ConfigError(
                f"{destination}: {relation} the source {source}; nothing was changed; name a "
                "destination outside of the source"
            )


def _relation(destination: Path, source: Path) -> str | None:
    """Return a phrase for the overlap of `destination` and `source`, both resolved, or None."""
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


def _same(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return path == other  # a path that does not exist has no other name


def _holds(mounts: list[_Mount], outer: Path, inner: Path) -> bool:
    """Return whether `inner` is or lies in `outer`, by the mount table."""
    place = _place(mounts, inner)
    if place is None:
        return False
    outer_place = _place(mounts, outer)
    below = [mount.root for mount in mounts if mount.point.is_relative_to(outer)]
    return any(
        mounted.device == place.device and place.path.is_relative_to(mounted.path)
        for mounted in [*([outer_place] if outer_place is not None else []), *below]
    )


def _place(mounts: list[_Mount], path: Path) -> _Place | None:
    # The last mount at a point hides earlier ones.
    over = [mount for mount in reversed(mounts) if path.is_relative_to(mount.point)]
    if not over:
        return None
    mount = max(over, key=lambda mount: len(mount.point.parts))
    return _Place(mount.root.device, mount.root.path / path.relative_to(mount.point))


def _mounts() -> Iterator[_Mount]:
    """Yield the mounts in /proc/self/mountinfo; none if the file does not exist."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(" ")
        if len(fields) > 4:
            root, point = (
                _ESCAPED.sub(lambda text: chr(int(text[1], 8)), text) for text in fields[3:5]
            )
            yield _Mount(Path(point), _Place(fields[2], PurePosixPath(root)))
