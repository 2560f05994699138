"""Opens the store of a directory: the only module that chooses the kind of store."""

from __future__ import annotations

import os

from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.storage.direct_io import NEVER, DirectIo
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Store


def refuse_url(root: str | os.PathLike[str]) -> None:
    """Raise if `root` is a URL, which as a path would be a directory on a local disk of each node.

    Raises:
        ConfigError: `root` is a URL, or its name is not UTF-8, which messages to agents must be.
    """
    if "://" in str(root):
        raise ConfigError(
            f"{root}: is not a path, and object stores are not supported yet; save to a file "
            "system that all nodes share"
        )
    try:
        str(root).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{str(root)!a}: is not UTF-8; rename the directory, or name another one"
        ) from error


def open_store(root: str | os.PathLike[str], direct_io: DirectIo = NEVER) -> Store:
    """Return the store at `root`. If `root` does not exist, the first write makes it.

    Args:
        direct_io: decides whether files written by `Store.writer` bypass the page cache.
    """
    return PosixStore(root, direct_io)
