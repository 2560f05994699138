"""Waits for names that a network file system shows late.

NFS may show a new name, or the new contents of a name, up to a minute late (`acdirmax`). A load on
another node than that of the committing agent then sees older facts. What it sees tells that it
does not see all (`lineage.awaited`). After the wait, the load believes what it sees.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from megatron_flashckpt.catalog.lineage import Facts, awaited
from megatron_flashckpt.storage.opening import is_url

logger = logging.getLogger(__name__)

_POLL_S = 0.25
#: File systems of one machine, whose names are never late.
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"}


def read_settled(
    read: Callable[[], Facts],
    place: str,
    wait_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Facts:
    """Return `read()`, repeated until nothing seems to be missing. Rank 0 calls this.

    Args:
        wait_s: longest wait in seconds.

    Raises:
        FlashCkptError: `read` failed.
    """
    facts = read()
    deadline = clock() + wait_s
    if wait_s > 0 and (missing := awaited(facts)) is not None:
        logger.warning(
            "%s: waiting at most %.0f s for %s, because the file system may show it late",
            *(place, wait_s, missing),
        )
    while awaited(facts) is not None and clock() < deadline:
        sleep(_POLL_S)
        facts = read()
    return facts


def may_be_late(root: str, mounts: str | None = None) -> bool:
    """Return whether names below `root` may come late: it is on a network file system.

    An object store shows a name at once.

    Args:
        mounts: the contents of `/proc/self/mountinfo`, which are read by default.
    """
    if is_url(root):
        return False
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
        except OSError:
            return True
    path = os.path.realpath(root)
    best, kind = "", ""
    for line in mounts.splitlines():
        fields, _, described = line.partition(" - ")
        if len(fields.split()) < 5 or not described:
            continue
        point = fields.split()[4].replace("\\040", " ")
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best):
            best, kind = point, described.split()[0]
    return kind not in LOCAL
