"""The save directory of a cell: on a file system, or a prefix of a bucket on a real S3 server.

As in `trouble`, a file in the cell's directory says so; without it the cell is on files. Failpoints
of one kind of store are hit on that kind only.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

from megatron_flashckpt.failpoints import POINTS
from tests.support.object_server import BUCKET

PLAIN, FAULTY, S3 = STORAGES = ("plain", "faulty", "s3")
_URL = "url"
#: Beginning of the modules whose failpoints another kind of storage does not hit.
_OF_OTHERS = {PLAIN: "storage.object_", FAULTY: "storage.object_", S3: "storage.posix_"}


def put_in_bucket(home: Path, url: str | None = None) -> None:
    """Put the cell in the empty directory `home` at a URL; by default at an empty prefix."""
    (home / _URL).write_text(url or f"s3://{BUCKET}/{uuid.uuid4().hex}/save")


def root_of(home: Path) -> Path | str:
    """Return the save directory of the cell in `home`."""
    with contextlib.suppress(FileNotFoundError):
        return (home / _URL).read_text()
    return home / "save"


def is_hit(point: str, storage: str) -> bool:
    """Return whether processes on this storage hit a failpoint."""
    return not POINTS[point][0].startswith(_OF_OTHERS[storage])
