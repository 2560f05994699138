"""Opens the store of a directory or of a URL: the only module that chooses the kind of store."""

from __future__ import annotations

import os

from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.storage.direct_io import NEVER, DirectIo
from megatron_flashckpt.storage.object_store import SCHEMES, ObjectStore
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Store


def is_url(root: str | os.PathLike[str]) -> bool:
    """Return whether `root` names an object store, and no directory."""
    return "://" in str(root)


def refuse_url(root: str | os.PathLike[str]) -> None:
    """Raise if `root` is a URL, which as a path would be a directory on a local disk of each node.

    Raises:
        ConfigError: `root` is a URL, or its name is not UTF-8, which messages to agents must be.
    """
    if is_url(root):
        raise ConfigError(
            f"{root}: is not a path, and object stores are not supported here yet; name a "
            "directory on a file system that all nodes share"
        )
    try:
        str(root).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{str(root)!a}: is not UTF-8; rename the directory, or name another one"
        ) from error


def open_store(root: str | os.PathLike[str], direct_io: DirectIo = NEVER) -> Store:
    """Return the store in the directory `root`, which the first write makes if it is missing.

    Args:
        direct_io: decides whether files written by `Store.writer` bypass the page cache.
    """
    return PosixStore(root, direct_io)


def open_path_or_url(root: str) -> Store:
    """Return the store at `root`, for commands that a person gives a path or a URL.

    Raises:
        ConfigError: `root` is a URL that cannot be opened.
    """
    if not is_url(root):
        return open_store(root)
    if root.partition("://")[0] not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"{root}: is of no known kind; use {known} or a path")
    return ObjectStore(root)
