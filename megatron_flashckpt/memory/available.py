"""How much memory this process may still take: the node's, or less if a control group says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: By version of control groups: the limit, the use, and what of the use is cache that can go.
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_nbytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can be taken without swapping or being killed, as far as is known.

    Containers and batch systems limit a job's memory by control groups, which `MemAvailable`
    knows nothing of; the kernel kills who takes more.
    """
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_left_in_groups(proc, groups)]))


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Yield what each memory group around this process has left."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
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
        # In a container the path may be the host's, and the root of the mount is what counts.
        group = root / path.lstrip("/")
        for each in (group, *group.parents):
            if each.is_relative_to(root) and (left := _left(each, version)) is not None:
                yield left


def _left(group: Path, version: int) -> int | None:
    limit_name, used_name, cache_name = _FILES[version]
    try:
        limit = (group / limit_name).read_text().strip()
        used = int((group / used_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get(cache_name, 0))
