"""Writes one large file past the page cache where that is faster."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from pathlib import Path

from megatron_flashckpt.error_classes import is_unsupported
from megatron_flashckpt.errors import AlreadyExistsError, StorageError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.storage.direct_io import ALIGNMENT, DirectIo, is_aligned
from megatron_flashckpt.storage.posix_files import (
    PART,
    fallocate,
    name_whole_file,
    storage_errors,
    sync_directory,
    temporary_name,
)

#: Bytes of a file that may collect in the page cache before they are sent to storage.
_CACHED_NBYTES = 64 * 1024 * 1024


class PosixWriter:
    """See `storage.store.Writer`. The directory of the file exists.

    Whole pages of aligned memory bypass the page cache where that is faster. All other bytes go
    through the page cache and are dropped from it once they are durable. Checkpoints must not evict
    the files that the data loader has cached.
    """

    def __init__(self, path: Path, nbytes: int, direct_io: DirectIo) -> None:
        self._path = path
        #: The file until it is whole: what others rely on is never open for writing.
        self._temporary = path.with_name(temporary_name(path.name, PART))
        self._direct_fd = -1
        self._lock = threading.Lock()
        self._cached_nbytes = 0
        with storage_errors(path, "create", makes=True):
            if _exists(path):
                raise _already_exists(path)
            # The umask decides the mode, as for all other files.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._temporary, flags, 0o666)
        try:
            with storage_errors(path, f"reserve its {nbytes} bytes"):
                self._reserve(nbytes)
            with storage_errors(path, "open", makes=True):
                self._file_system = direct_io.of(self._fd, self._temporary)
                self._direct_fd = self._file_system.open(self._temporary)
        except OSError:
            self.abandon()
            raise

    def _reserve(self, nbytes: int) -> None:
        """Reserve the space, so that a full disk is reported before the first byte is written."""
        try:
            fallocate(self._fd, nbytes)
        except OSError as error:
            # Some network file systems cannot reserve space; there, a write reports a full disk.
            if not is_unsupported(error):
                raise

    def write_at(self, offset: int, chunk: bytes | memoryview) -> None:
        view = memoryview(chunk)
        with storage_errors(self._path, "write"):
            pages = 0
            if self._direct_fd >= 0 and is_aligned(offset, view):
                pages = view.nbytes - view.nbytes % ALIGNMENT
                with self._file_system.timed_write(self._fd, pages) as direct:
                    write = self._write_past_cache if direct else self._write_through_cache
                    write(offset, view[:pages])
            self._write_through_cache(offset + pages, view[pages:])

    def _write_past_cache(self, offset: int, view: memoryview) -> None:
        while view.nbytes and is_aligned(offset, view):
            try:
                written = _pwrite(self._direct_fd, view, offset)
            except OSError as error:
                if not is_unsupported(error):
                    raise
                self._file_system.refused()
                break
            view, offset = view[written:], offset + written
        # Bytes are left only if O_DIRECT was refused or a write ended in the middle of a page.
        self._write_through_cache(offset, view)

    def _write_through_cache(self, offset: int, view: memoryview) -> None:
        with self._lock:
            self._cached_nbytes += view.nbytes
            drop = self._cached_nbytes >= _CACHED_NBYTES
            if drop:
                self._cached_nbytes = 0
        while view.nbytes:
            written = _pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written
        if drop:
            self._drop_cached()

    def _drop_cached(self) -> None:
        """Drop durable bytes from the page cache, and start writing the others back."""
        with contextlib.suppress(OSError):  # a hint to the kernel
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        with storage_errors(self._path, "make durable", makes=True):
            os.fdatasync(self._fd)
            self._drop_cached()
            self._close()
            hit("file.synced")
            try:
                name_whole_file(self._temporary, self._path)
            except FileExistsError as error:
                raise _already_exists(self._path) from error
            except FileNotFoundError as error:
                if not self._path.parent.is_dir():
                    raise
                # As for a create: whoever took the writer for dead has it begin again.
                raise StorageError(
                    errno.ESTALE, f"{self._path}: its unfinished file was removed; write it again"
                ) from error
            sync_directory(self._path.parent)

    def _close(self) -> None:
        """Close both descriptors, then raise the first error.

        NFS reports a full quota or disk when a file is closed. A descriptor left open would keep
        the space of a removed file, which still counts toward the quota.
        """
        fds = [fd for fd in (self._direct_fd, self._fd) if fd >= 0]
        self._direct_fd = self._fd = -1
        errors = []
        for fd in fds:
            try:
                os.close(fd)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()


def _exists(path: Path) -> bool:
    """Return whether there is a file of this name, before the bytes of another one are written."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(os.lstat(path).st_mode):  # open(2) of a FIFO waits for a reader
            # A network file system asks its server about the name.
            os.close(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
    return os.path.lexists(path)


def _already_exists(path: Path) -> AlreadyExistsError:
    return AlreadyExistsError(errno.EEXIST, f"{path}: exists already")


def _pwrite(fd: int, view: memoryview, offset: int) -> int:
    """Write at least one byte; return the number of written bytes.

    Raises:
        OSError: the file system wrote nothing and reported no error; FUSE passes that on.
    """
    written = os.pwrite(fd, view, offset)
    if not written:
        raise OSError(errno.EIO, "no byte was written")
    return written
