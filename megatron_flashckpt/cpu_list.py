"""CPUs of a rank, and lists of CPUs as the kernel and `taskset` write them: `0-3,8`, `0-30:2`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

#: Largest CPU number plus one, above that of any kernel; bounds the memory of a list.
_MOST = 2**16
_ITEM = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?")


def parse(text: str) -> frozenset[int]:
    """Return the CPUs of a list.

    Raises:
        ValueError: `text` is not a list of CPUs.
    """
    result: set[int] = set()
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of CPUs such as '0-3,8'")
        first, last, step = match.groups()
        cpus = range(int(first), int(last or first) + 1, int(step or 1))
        if not cpus or cpus[-1] >= _MOST:
            raise ValueError(f"{text!r} is not a list of CPUs: {item.strip()!r} names no CPU")
        result.update(cpus)
    return frozenset(result)


def shown(cpus: Iterable[int]) -> str:
    """Return CPUs as a list of ranges, such as `0-3,8`."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def cpus_of_rank() -> int:
    """Return the number of CPUs of this rank, if the ranks of its node share them; at least 1."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = max(1, int(given)) if given.isdecimal() else 1
    return max(1, min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // ranks))
