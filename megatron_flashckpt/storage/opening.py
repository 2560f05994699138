"""Opens the store of a directory or of a URL: the only module that chooses the kind of store."""

from __future__ import annotations

import os

from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.storage.direct_io import NEVER, DirectIo
from megatron_flashckpt.storage.msc_profile import MSC, bucket_of
from megatron_flashckpt.storage.object_store import SCHEMES, ObjectStore
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Store

#: Kinds of URLs: buckets, and profiles that name buckets.
_KINDS = (*SCHEMES, "msc")


def is_url(root: str | os.PathLike[str]) -> bool:
    """Return whether `root` names an object store that this package can use."""
    scheme, found, _ = str(root).partition("://")
    return bool(found) and scheme in _KINDS


def refuse_unusable(root: str | os.PathLike[str]) -> None:
    """Raise if a job cannot save to `root`. Storage is not asked.

    Raises:
        ConfigError: `root` is a URL of another kind, which as a path would be a directory on a
            local disk of each node, or cannot be opened, or its name is not UTF-8, which messages
            to agents must be.
    """
    if "://" in str(root):
        open_store(root)
    try:
        str(root).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{str(root)!a}: is not UTF-8; rename the directory, or name another one"
        ) from error


def refuse_url(root: str | os.PathLike[str]) -> None:
    """Raise if `root` is a URL, or no directory can have its name.

    Raises:
        ConfigError: `root` is a URL, or as in `refuse_unusable`.
    """
    if "://" in str(root):
        raise ConfigError(
            f"{root}: is a URL, but 'flashckpt convert' writes files only; name a directory, and "
            "copy the result to the bucket"
        )
    refuse_unusable(root)


def absolute(root: str | os.PathLike[str]) -> str:
    """Return the one name of a save directory in this job: its absolute path, or its URL."""
    return str(root).rstrip("/") if is_url(root) else os.path.abspath(root)


def open_store(root: str | os.PathLike[str], direct_io: DirectIo = NEVER) -> Store:
    """Return the store at `root`. A directory that is missing is made by the first write.

    Args:
        root: a path, or a URL of one of `_KINDS`.
        direct_io: decides whether files written by `Store.writer` bypass the page cache.

    Raises:
        ConfigError: `root` is a URL of another kind, or cannot be opened.
    """
    if str(root).startswith(MSC):
        return ObjectStore(str(root), bucket_of(str(root)))
    if is_url(root):
        return ObjectStore(str(root))
    if "://" in str(root):
        known = ", ".join(f"{scheme}://" for scheme in _KINDS)
        raise ConfigError(f"{root}: is of no known kind; use {known} or a path")
    return PosixStore(root, direct_io)
