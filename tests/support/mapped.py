"""Mappings of slabs in this process, by slab name."""

from __future__ import annotations

from pathlib import Path


def times_mapped(name: str) -> int:
    """Return the number of mappings of the slab that was created as `name`."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"/memfd:flashckpt-{name} " in line for line in maps)
