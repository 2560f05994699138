"""Memory that this process may still take: that of the machine or of its control group."""

from __future__ import annotations

import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Files per version of control groups: limit, usage, and the field of `memory.stat` for cache that
#: the kernel can drop.
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


class Limit(NamedTuple):
    """A bound on the memory that several processes may take together."""

    key: str
    """Identifies the bound: equal in all of these processes, in any container of a machine."""
    place: str
    """Name of the machine or control group that sets the bound, for messages."""
    left_nbytes: int
    """Bytes that the processes may still take before the kernel swaps or kills."""


class ProcessLimit(NamedTuple):
    """A bound on what this process alone may take."""

    name: str
    """Name of the bound, with the command that shows it."""
    left_nbytes: int
    """Size of the largest slab that the bound allows."""


def shown(nbytes: int) -> str:
    """Return a number of bytes as text, in MiB or GiB."""
    unit, name = (2**30, "GiB") if nbytes >= 2**30 else (2**20, "MiB")
    return f"{nbytes / unit:.1f} {name}"


def process_limits() -> list[ProcessLimit]:
    """Return the limits of this process on the size of a slab, which is a file and is mapped.

    The agent writes the shards and inherits these limits.
    """
    bounds = []
    largest_file, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest_file != resource.RLIM_INFINITY:
        bounds.append(ProcessLimit("file size limit (ulimit -f)", largest_file))
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        pages = int((_PROC / "self/statm").read_text().split()[0])
        left = addresses - pages * resource.getpagesize()
        bounds.append(ProcessLimit("address space limit (ulimit -v)", max(0, left)))
    return bounds


def available_nbytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return the bytes that can be taken before the kernel swaps or kills, as far as is known."""
    return max(0, min(limit.left_nbytes for limit in limits(proc, groups)))


def limits(proc: Path = _PROC, groups: Path = _GROUPS) -> list[Limit]:
    """Return all bounds on this process's memory; the first one is that of the machine.

    Containers and batch systems bound a job's memory by control groups, which `MemAvailable`
    ignores; the kernel kills processes that take more. A memfd counts toward its control group.
    """
    machine = _machine(proc)
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return [Limit(machine, "the machine", available), *_groups(proc, groups, machine)]


def _machine(proc: Path) -> str:
    """Return a unique name of the running machine, equal in all of its containers."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _groups(proc: Path, groups: Path, machine: str) -> Iterator[Limit]:
    """Yield the limit of each memory group around this process."""
    try:
        lines = (proc / "self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, version = groups / "memory", 1
        elif not controllers:
            root, version = groups, 2
        else:
            continue
        # In a container, the path may be the host's; then the root of the mount has the limit.
        group = root / path.lstrip("/")
        for ancestor in (group, *group.parents):
            if ancestor.is_relative_to(root) and (left := _left(ancestor, version)) is not None:
                # Containers see their groups under other paths; the inode is the kernel's.
                key = f"{machine} {version} {ancestor.stat().st_ino}"
                yield Limit(key, f"control group {ancestor}", left)


def _left(group: Path, version: int) -> int | None:
    limit_name, used_name, cache_name = _FILES[version]
    try:
        limit = (group / limit_name).read_text().strip()
        used = int((group / used_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get(cache_name, 0))
