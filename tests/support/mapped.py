"""What this process has mapped, by the names of slabs."""

from __future__ import annotations

from pathlib import Path


def times_mapped(name: str) -> int:
    """Return how many mappings there are of the slab that was made as `name`."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"/memfd:flashckpt-{name} " in line for line in maps)
