"""Opens the storage of a directory: the only module that chooses the kind of storage."""

from __future__ import annotations

import os

from megatron_flashckpt.storage.base import Storage
from megatron_flashckpt.storage.direct_io import NEVER, DirectIo
from megatron_flashckpt.storage.posix import PosixStorage


def open_storage(root: str | os.PathLike[str], direct_io: DirectIo = NEVER) -> Storage:
    """Return the storage at `root`. If `root` does not exist, the first write creates it.

    Args:
        direct_io: decides whether files written by `Storage.create` bypass the page cache.
    """
    return PosixStorage(root, direct_io)
