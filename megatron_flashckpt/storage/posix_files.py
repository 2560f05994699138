"""Operations on one file or directory of a POSIX store, with the remedies of their errors."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from megatron_flashckpt.error_classes import class_of, is_unsupported
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.failpoints import hit

logger = logging.getLogger(__name__)

#: Remedy where a file or directory is missing right after it was made.
_REMOVED = (
    "another process removed the directory: find that process, and do not clean up a save "
    "directory while its job runs; the next save makes the directory again"
)

#: The system call fallocate(2); None where the C library lacks it. `posix_fallocate` of glibc
#: emulates the call where the file system refuses it: it writes one byte per block, 65,538 writes
#: for a file of 256 MiB. NFS before 4.2, CephFS and many FUSE file systems refuse.
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]

#: Suffix of the temporary name of a large file, whose writer cannot begin again at once.
PART = ".part"
_TEMPORARY = re.compile(rf"\.(.+)\.[0-9a-f]{{8}}(?:\.tmp|{re.escape(PART)})")


def temporary_name(name: str, suffix: str = ".tmp") -> str:
    """Return a unique name under which file `name` is written until it is complete."""
    return f".{name}.{uuid.uuid4().hex[:8]}{suffix}"


def parse_temporary_name(name: str) -> str | None:
    """Return the final name of a temporary file; None if `temporary_name` did not make `name`."""
    match = _TEMPORARY.fullmatch(name)
    return match and match[1]


@contextlib.contextmanager
def storage_errors(path: Path | str, action: str, *, makes: bool = False) -> Iterator[None]:
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
    except StorageError:  # has all three already
        raise
    except OSError as error:
        raise StorageError(
            error.errno, f"{path}: cannot {action} ({error.strerror}); {class_of(error).remedy}"
        ) from error


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file at `path` with one that holds `data`, atomically.

    The data is durable before the file has its name; the name is not before `sync_directory`.
    """
    temporary = path.with_name(temporary_name(path.name))
    write_new(temporary, data)
    try:
        hit("put.written")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    hit("put.renamed")


def link_file(path: Path, data: bytes) -> None:
    """Give `path`, which must not exist, a file that holds `data`, which is durable.

    The name is not durable before `sync_directory`.

    Raises:
        FileExistsError: `path` exists; it is not changed.
        OSError: for example because the file system has no hard links.
    """
    temporary = path.with_name(temporary_name(path.name))
    write_new(temporary, data)
    try:
        hit("put.written")
        os.link(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    hit("put.renamed")


def name_whole_file(temporary: Path, path: Path) -> None:
    """Give the whole file `temporary` the name `path`, which must not exist.

    Without hard links, a file that gets the name in the same moment is replaced.

    Raises:
        FileExistsError: `path` exists; it is not changed.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if not lacks_links(error):
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        temporary.rename(path)
    else:
        with contextlib.suppress(OSError):
            temporary.unlink()


def lacks_links(error: OSError) -> bool:
    """Return whether a hard link failed because the file system has none."""
    # EPERM: Linux, for a file system without this operation.
    return is_unsupported(error) or error.errno == errno.EPERM


def write_new(path: Path, data: bytes) -> None:
    """Write `data` durably to a new file; remove the file if that fails.

    Raises:
        FileExistsError: `path` exists; it is not changed.
    """
    file = open(path, "xb")  # noqa: SIM115, only a file made here is removed below
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def open_nofollow(path: str, flags: int) -> int:
    """Return a descriptor of a file or directory; raise OSError for a link, FIFO or device."""
    # O_NONBLOCK: opening a FIFO must not wait for a writer. Regular files ignore the flag.
    # The mode is that of `open`: a new file is no program.
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(fd)
        raise OSError(errno.ESPIPE, "is not a file")
    return fd


def read_at(fd: int, offset: int, nbytes: int | None) -> bytes:
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


def sync_directory(path: Path) -> None:
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


def fallocate(fd: int, nbytes: int) -> None:
    """Reserve the first `nbytes` bytes of the file `fd`, and extend the file to that size.

    Raises:
        OSError: EOPNOTSUPP where the file system cannot reserve space; ENOSPC, EDQUOT if there is
            not enough of it.
    """
    if nbytes <= 0:
        return  # the system call refuses such a length
    if _fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _fallocate(fd, 0, 0, nbytes):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
