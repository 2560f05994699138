"""Storage in a directory: local disk, NFS, Lustre."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megatron_flashckpt.error_classes import class_of, is_unsupported
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.storage.base import Durable, Kind, Stamp, temporary_name
from megatron_flashckpt.storage.direct_io import ALIGNMENT, NEVER, DirectIo, is_aligned
from megatron_flashckpt.storage.fallocate import fallocate
from megatron_flashckpt.storage.scatter_read import KeptFiles, OpenFile, Seen, read_parts

logger = logging.getLogger(__name__)

#: Remedy where a file or directory is missing right after it was made.
_REMOVED = (
    "another process removed the directory: find that process, and do not clean up a save "
    "directory while its job runs; the next save makes the directory again"
)

#: Bytes of a file that may collect in the page cache before they are sent to storage.
_CACHED_NBYTES = 64 * 1024 * 1024


@contextlib.contextmanager
def _storage_errors(path: Path, action: str, *, makes: bool = False) -> Iterator[None]:
    """Turn an OSError into a StorageError with fact, place and remedy.

    Args:
        makes: the caller makes the path, so a missing file or directory was removed meanwhile.
            Without it, FileNotFoundError passes.
    """
    try:
        yield
    except FileNotFoundError as error:
        if not makes:
            raise
        raise StorageError(
            error.errno, f"{path}: cannot {action} ({error.strerror}); {_REMOVED}"
        ) from error
    except StorageError:  # raised by a guard
        raise
    except OSError as error:
        raise StorageError(
            error.errno, f"{path}: cannot {action} ({error.strerror}); {class_of(error).remedy}"
        ) from error


class PosixWriter:
    """See `storage.base.Writer`.

    Whole pages of aligned memory bypass the page cache where that is faster. All other bytes go
    through the page cache and are dropped from it once they are durable. Checkpoints must not evict
    the files that the data loader has cached.
    """

    def __init__(self, path: Path, nbytes: int, direct_io: DirectIo) -> None:
        self._path = path
        self._direct_fd = -1
        self._lock = threading.Lock()
        self._cached_nbytes = 0
        with _storage_errors(path, "create", makes=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISFIFO(os.lstat(path).st_mode):
                    raise OSError(errno.ESPIPE, "is not a file")  # open(2) waits for a reader
            # O_NOFOLLOW: a planted symbolic link must not redirect the write. The umask decides
            # the mode, as for all other files.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o666)
        try:
            with _storage_errors(path, f"reserve its {nbytes} bytes"):
                self._reserve(nbytes)
            with _storage_errors(path, "open", makes=True):
                self._file_system = direct_io.of(self._fd, path)
                self._direct_fd = self._file_system.open(path)
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
        with _storage_errors(self._path, "write"):
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
        with _storage_errors(self._path, "make durable", makes=True):
            os.fdatasync(self._fd)
            self._drop_cached()
            self._close()
            hit("file.synced")
            _sync_directory(self._path.parent)

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
            self._path.unlink()


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
        temporary = path.with_name(temporary_name(path.name))
        with _storage_errors(path, "write", makes=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(temporary, "xb")  # noqa: SIM115, only a file made here is removed below
            try:
                with file:
                    file.write(data)
                    file.flush()
                    if durable != "nothing":
                        os.fsync(file.fileno())
                hit("put.written")
                if guard is not None:
                    guard()
                os.replace(temporary, path)
                hit("put.renamed")
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            if durable == "name":
                _sync_directory(path.parent)

    def rewrite(self, name: str, expected: bytes, data: bytes) -> bool:
        path = self._own(name)
        with _storage_errors(path, "write"):
            try:
                # The descriptor keeps this file open, even if another file is renamed to its name.
                fd = _open_nofollow(str(path), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            file = OpenFile(fd)
            if _read_at(file.fd, 0, len(expected) + 1) != expected:
                return False
            os.pwrite(file.fd, data, 0)
            return True

    def create(self, name: str, nbytes: int) -> PosixWriter:
        return PosixWriter(self._own(name), nbytes, self._direct_io)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        path = self._path(name)
        with _storage_errors(path, "read"):
            file = OpenFile(_open_nofollow(str(path), os.O_RDONLY | os.O_CLOEXEC))
            return _read_at(file.fd, offset, nbytes)

    def read_into(
        self,
        name: str,
        offset: int,
        parts: Sequence[memoryview],
        seen: Seen | None = None,
        kept: KeptFiles | None = None,
    ) -> int:
        path = self._path(name)
        with _storage_errors(path, "read"):
            kept = KeptFiles() if kept is None else kept
            file = kept.get(name, lambda: _open_nofollow(str(path), os.O_RDONLY | os.O_CLOEXEC))
            return read_parts(file.fd, offset, parts, seen)

    def size(self, name: str) -> int:
        path = self._path(name)
        with _storage_errors(path, "look at"):
            return path.stat(follow_symlinks=False).st_size

    def stamp(self, name: str) -> Stamp:
        path = self._path(name)
        with _storage_errors(path, "look at"):
            status = path.stat(follow_symlinks=False)
            return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)

    def list(self, directory: str) -> list[str]:
        path = self._path(directory) if directory else self._root
        with _storage_errors(path, "list"):
            try:
                return sorted(os.listdir(path))
            except FileNotFoundError:
                return []

    def present(self, directory: str, names: Iterable[str]) -> set[str]:
        path = self._path(directory) if directory else self._root
        names = [self._path(f"{directory}/{name}" if directory else name).name for name in names]
        with _storage_errors(path, "look at"):
            try:
                # Opening the directory makes NFS ask its server for changes. Otherwise a file that
                # was missing a moment ago would count as missing for up to a minute.
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return set()
            try:
                return {name for name in names if _is_in(fd, name)}
            finally:
                os.close(fd)

    def delete(self, name: str) -> None:
        path = self._own(name)
        with _storage_errors(path, "delete"):
            path.unlink(missing_ok=True)

    def kind(self, name: str) -> Kind | None:
        path = self._path(name)
        with _storage_errors(path, "look at"):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                return None
        if stat.S_ISREG(mode):
            return "file"
        return "directory" if stat.S_ISDIR(mode) else "other"

    def move(self, name: str, to: str) -> None:
        path, target = self._own(name), self._own(to)
        with _storage_errors(path, "rename"):
            os.rename(path, target)
            _sync_directory(target.parent)
            _sync_directory(path.parent)

    def delete_directory(self, name: str) -> None:
        path = self._own(name)
        with _storage_errors(path, "delete"):
            try:
                path.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    raise


def _pwrite(fd: int, view: memoryview, offset: int) -> int:
    """Write at least one byte; return the number of written bytes.

    Raises:
        OSError: the file system wrote nothing and reported no error; FUSE passes that on.
    """
    written = os.pwrite(fd, view, offset)
    if not written:
        raise OSError(errno.EIO, "no byte was written")
    return written


def _open_nofollow(path: str, flags: int) -> int:
    """Return a descriptor of a file or directory; raise OSError for a link, FIFO or device."""
    # O_NONBLOCK: opening a FIFO must not wait for a writer. Regular files ignore the flag.
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(fd)
        raise OSError(errno.ESPIPE, "is not a file")
    return fd


def _read_at(fd: int, offset: int, nbytes: int | None) -> bytes:
    """Return `nbytes` of a file from `offset` (None: to the end); fewer only at its end."""
    # `os.pread` instead of a file object, whose `read` takes EAGAIN for the end of the file.
    remaining_nbytes = max(os.fstat(fd).st_size - offset, 0)
    remaining_nbytes = remaining_nbytes if nbytes is None else min(remaining_nbytes, nbytes)
    chunks = []
    # A directory has a size, too; its first read raises EISDIR.
    while (chunk := os.pread(fd, remaining_nbytes, offset)) and remaining_nbytes:
        chunks.append(chunk)
        remaining_nbytes, offset = remaining_nbytes - len(chunk), offset + len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _is_in(directory_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _sync_directory(path: Path) -> None:
    """Make a new directory entry durable, where the file system can fsync a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems cannot (PostgreSQL ignores EINVAL and EBADF here); there, the file
        # system decides when a new name becomes durable.
        if error.errno != errno.EBADF and not is_unsupported(error):
            raise
        logger.debug("%s: this file system cannot fsync a directory (%s)", path, error.strerror)
    finally:
        os.close(fd)
