"""Storage in a directory: local disk, NFS, Lustre."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.storage.base import Durable, Kind, Stamp
from megatron_flashckpt.storage.direct_io import NEVER, DirectIo
from megatron_flashckpt.storage.posix_files import (
    is_in,
    open_nofollow,
    read_at,
    replace_file,
    storage_errors,
    sync_directory,
)
from megatron_flashckpt.storage.posix_writer import PosixWriter
from megatron_flashckpt.storage.scatter_read import KeptFiles, OpenFile, Seen, read_parts


class PosixStorage:
    """See `storage.base.Storage`. The root is created with the first write."""

    def __init__(self, root: str | os.PathLike[str], direct_io: DirectIo = NEVER) -> None:
        self._root = Path(root).absolute()
        self._direct_io = direct_io

    @property
    def place(self) -> str:
        return str(self._root)

    def _path(self, name: str) -> Path:
        parts = name.split("/")
        if not all(parts) or any(part in (".", "..") for part in parts) or "\0" in name:
            raise StorageError(errno.EINVAL, f"{name!r} is not a name inside {self._root}")
        return self._root / name

    def _own(self, name: str) -> Path:
        """Return the path of a file to be changed; raise StorageError if a parent is a link."""
        path = self._path(name)
        directory, _, _ = name.rpartition("/")
        while directory:
            # `os.path` instead of `Path`, for speed: a commit deletes the records of all ranks.
            if os.path.islink(f"{self._root}/{directory}"):
                raise StorageError(
                    errno.ELOOP,
                    f"{self._root / directory}: is a symbolic link; files are not written or "
                    "deleted through links: remove it",
                )
            directory, _, _ = directory.rpartition("/")
        return path

    def put(
        self,
        name: str,
        data: bytes,
        durable: Durable = "name",
        guard: Callable[[], None] | None = None,
    ) -> None:
        path = self._own(name)
        with storage_errors(path, "write", makes=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, data, synced=durable != "nothing", guard=guard)
            if durable == "name":
                sync_directory(path.parent)

    def rewrite(self, name: str, expected: bytes, data: bytes) -> bool:
        path = self._own(name)
        with storage_errors(path, "write"):
            try:
                # The descriptor keeps this file open, even if another file is renamed to its name.
                fd = open_nofollow(str(path), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            file = OpenFile(fd)
            if read_at(file.fd, 0, len(expected) + 1) != expected:
                return False
            os.pwrite(file.fd, data, 0)
            return True

    def create(self, name: str, nbytes: int) -> PosixWriter:
        path = self._own(name)
        with storage_errors(path, "create", makes=True):
            path.parent.mkdir(parents=True, exist_ok=True)
        return PosixWriter(path, nbytes, self._direct_io)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        path = self._path(name)
        with storage_errors(path, "read"):
            file = OpenFile(open_nofollow(str(path), os.O_RDONLY | os.O_CLOEXEC))
            return read_at(file.fd, offset, nbytes)

    def read_into(
        self,
        name: str,
        offset: int,
        parts: Sequence[memoryview],
        seen: Seen | None = None,
        kept: KeptFiles | None = None,
    ) -> int:
        path = self._path(name)
        with storage_errors(path, "read"):
            kept = KeptFiles() if kept is None else kept
            file = kept.get(name, lambda: open_nofollow(str(path), os.O_RDONLY | os.O_CLOEXEC))
            return read_parts(file.fd, offset, parts, seen)

    def size(self, name: str) -> int:
        path = self._path(name)
        with storage_errors(path, "look at"):
            return path.stat(follow_symlinks=False).st_size

    def stamp(self, name: str) -> Stamp:
        path = self._path(name)
        with storage_errors(path, "look at"):
            status = path.stat(follow_symlinks=False)
            return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)

    def list(self, directory: str) -> list[str]:
        path = self._path(directory) if directory else self._root
        with storage_errors(path, "list"):
            try:
                return sorted(os.listdir(path))
            except FileNotFoundError:
                return []

    def present(self, directory: str, names: Iterable[str]) -> set[str]:
        path = self._path(directory) if directory else self._root
        names = [self._path(f"{directory}/{name}" if directory else name).name for name in names]
        with storage_errors(path, "look at"):
            try:
                # Opening the directory makes NFS ask its server for changes. Otherwise a file that
                # was missing a moment ago would count as missing for up to a minute.
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return set()
            try:
                return {name for name in names if is_in(fd, name)}
            finally:
                os.close(fd)

    def delete(self, name: str) -> None:
        path = self._own(name)
        with storage_errors(path, "delete"):
            path.unlink(missing_ok=True)

    def kind(self, name: str) -> Kind | None:
        path = self._path(name)
        with storage_errors(path, "look at"):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                return None
        if stat.S_ISREG(mode):
            return "file"
        return "directory" if stat.S_ISDIR(mode) else "other"

    def move(self, name: str, to: str) -> None:
        path, target = self._own(name), self._own(to)
        with storage_errors(path, "rename"):
            os.rename(path, target)
            sync_directory(target.parent)
            sync_directory(path.parent)

    def delete_directory(self, name: str) -> None:
        path = self._own(name)
        with storage_errors(path, "delete"):
            try:
                path.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    raise
