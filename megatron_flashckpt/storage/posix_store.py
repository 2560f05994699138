"""A store in a directory: local disk, NFS, Lustre."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import AlreadyExistsError, StorageError
from megatron_flashckpt.storage.advice import FILES
from megatron_flashckpt.storage.direct_io import NEVER, DirectIo
from megatron_flashckpt.storage.parallel import for_all
from megatron_flashckpt.storage.posix_files import (
    PART,
    lacks_links,
    link_file,
    open_nofollow,
    parse_temporary_name,
    read_at,
    replace_file,
    storage_errors,
    sync_directory,
    temporary_name,
    write_new,
)
from megatron_flashckpt.storage.posix_writer import PosixWriter
from megatron_flashckpt.storage.scatter_read import KeptFiles, Seen, read_parts
from megatron_flashckpt.storage.store import Entry, Kind, Pace, check_name, parent_of

_T = TypeVar("_T")

#: Times that a directory is made for one write, while other processes remove it as empty.
_ATTEMPTS = 20
#: Suffix of the directory that decides a name where a file system has no hard links.
_DECIDED = ".decided"
#: The file in such a directory.
_OBJECT = "object"


class PosixStore:
    """See `storage.store.Store`. The root is made by the first write, and never again.

    Incomplete objects have temporary names, which `list` leaves out. Small ones of killed processes
    are removed with their directory, when it holds nothing else; large ones keep the directory.
    """

    advice = FILES
    in_order = False
    # Each look is two opens at a metadata server, which is busy with shards meanwhile.
    pace = Pace(shortest_s=0.02, longest_s=1.0, most_per_s=5_000)

    def __init__(self, root: str | os.PathLike[str], direct_io: DirectIo = NEVER) -> None:
        """Touch nothing. `direct_io` decides whether writers bypass the page cache."""
        self._root = Path(root).absolute()
        self.place = str(self._root)
        self._direct_io = direct_io
        #: Whether the file system has hard links; None until the first `create` has tried.
        self._has_links: bool | None = None
        #: Inode number of the root, from the first time that this store has seen it.
        self._inode: int | None = None

    # ------------------------------------------------------------------ reads

    def get(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        path = self._path(name)
        with storage_errors(path, "read"):
            fd = _open_to_read(path)
            try:
                return read_at(fd, offset, nbytes)
            finally:
                os.close(fd)

    def get_into(
        self,
        name: str,
        offset: int,
        parts: Sequence[memoryview],
        seen: Seen | None = None,
        kept: KeptFiles | None = None,
    ) -> int:
        # A load calls this for every 4 MiB, so a path is made only to open the file.
        with storage_errors(f"{self.place}/{name}", "read"):
            kept = KeptFiles() if kept is None else kept
            file = kept.get(name, lambda: _open_to_read(self._path(name)))
            try:
                return read_parts(file.fd, offset, parts, seen)
            except OSError:
                kept.drop(name)  # a stale handle stays stale
                raise

    def stat(self, name: str) -> Entry | None:
        path = self._path(name)
        with storage_errors(path, "look at"):
            try:
                status = _fresh(
                    path.parent, lambda fd: os.stat(path.name, dir_fd=fd, follow_symlinks=False)
                )
            except FileNotFoundError:
                return None
        return _entry(name, status)

    def list(self, directory: str, *, sizes: bool = True) -> builtins.list[Entry]:
        path = self._directory(directory)
        with storage_errors(path, "list"):
            try:
                with os.scandir(path) as scanned:
                    found = [entry for entry in scanned if not _is_hidden(entry.name)]
            except FileNotFoundError:
                return []
            look = _sized if sizes else _unsized
            return sorted(filter(None, for_all(look, found)))

    # ------------------------------------------------------------------ writes

    def put(self, name: str, data: bytes) -> None:
        def write(path: Path) -> None:
            replace_file(path, data)
            sync_directory(path.parent)

        self._in_its_directory(name, write)

    def create(self, name: str, data: bytes) -> None:
        def write(path: Path) -> None:
            try:
                self._name_once(path, data)
            except FileExistsError as error:
                raise AlreadyExistsError(errno.EEXIST, f"{path}: exists already") from error
            sync_directory(path.parent)

        self._in_its_directory(name, write)

    def _name_once(self, path: Path, data: bytes) -> None:
        """Give `path` the contents `data`; raise FileExistsError if it exists.

        The first call finds out whether there are hard links. All nodes must find the same, so they
        mount the file system in the same way.
        """
        if self._has_links is not False:
            try:
                link_file(path, data)
                self._has_links = True
                return
            except FileExistsError:
                raise
            except OSError as error:
                if self._has_links or not lacks_links(error):
                    raise
        _decide(path, data)
        self._has_links = False

    def writer(self, name: str, nbytes: int) -> PosixWriter:
        return self._in_its_directory(name, lambda path: PosixWriter(path, nbytes, self._direct_io))

    def discard_unfinished(self, directory: str, is_dead: Callable[[str], bool]) -> None:
        path = self._directory(directory)
        self._check_no_link(directory)
        with storage_errors(path, "list"), contextlib.suppress(FileNotFoundError):
            for name in os.listdir(path):
                final = parse_temporary_name(name)
                if final is not None and is_dead(final):
                    _remove_hidden(path / name)

    def make_durable(self, name: str) -> None:
        path = self._path(name)
        with storage_errors(path, "make durable"):
            for directory in path.relative_to(self._root).parents:
                sync_directory(self._root / directory)

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        directories = {parent_of(name) for name in names}
        paths = [self._path(name) for name in names]
        if not self._is_there():
            return
        for directory in sorted(directories):
            self._check_no_link(directory)

        def delete(path: Path) -> None:
            with storage_errors(path, "delete"):
                if not self._has_links:
                    # Before the name: else a create of a moment ago would bring the object back.
                    _remove_hidden(path.with_name(f".{path.name}{_DECIDED}"))
                path.unlink(missing_ok=True)

        for_all(delete, paths)
        for directory in directories:
            while directory and self._removed_empty(self._root / directory):
                directory = parent_of(directory)

    # ------------------------------------------------------------------ names and directories

    def _path(self, name: str) -> Path:
        check_name(name, self.place)
        return self._root / name

    def _directory(self, name: str) -> Path:
        return self._path(name) if name else self._root

    def _check_no_link(self, directory: str) -> None:
        """Raise StorageError if `directory` or one of its parents is a link."""
        while directory:
            # `os.path` instead of `Path`, for speed.
            if os.path.islink(f"{self._root}/{directory}"):
                raise StorageError(
                    errno.ELOOP,
                    f"{self._root / directory}: is a symbolic link; files are not written or "
                    "deleted through links: remove it",
                )
            directory = parent_of(directory)

    def _in_its_directory(self, name: str, write: Callable[[Path], _T]) -> _T:
        """Return `write(path)` of the object `name`, for which the directory is made if needed.

        Another process may have deleted the last other object and its directory meanwhile.
        """
        path = self._path(name)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with storage_errors(path, "write", makes=True):
                    changed = self._make_directory(parent_of(name))
                    result = write(path)
                    for directory in changed:
                        sync_directory(directory)
                    return result
            except StorageError as error:
                if error.errno != errno.ENOENT or attempt == _ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _make_directory(self, directory: str) -> builtins.list[Path]:
        """Make `directory`, and the root if this store has never seen it.

        Returns the directories with a new name, which is not durable yet.

        Raises:
            StorageError: the root is away, or something else stands where a directory should be.
        """
        if not self._is_there():
            os.makedirs(self._root, exist_ok=True)
            self._is_there()
        self._check_no_link(directory)
        parts = directory.split("/") if directory else []
        path, changed = self._root, []
        for part in parts:
            parent, path = path, path / part
            if not path.is_dir():
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
                changed.append(parent)
        return changed

    def _is_there(self) -> bool:
        """Return whether the root exists; False only if this store has never seen it.

        Raises:
            StorageError: the root is away, or another directory is in its place.
        """
        seen = self._inode  # before the look: another thread may make the root meanwhile
        inode = self._look_at_root()
        if seen is None:
            self._inode = inode or self._inode
        elif inode != seen:
            raise StorageError(
                errno.ENOTCONN,
                f"{self._root}: is away, or another directory is in its place: check this node's "
                "mount; it is not made again",
            )
        return inode is not None

    def _look_at_root(self) -> int | None:
        """Return the inode number of the root; None if it is missing."""
        with storage_errors(self._root, "look at"):
            try:
                return os.stat(f"{self._root}/.").st_ino  # "/.": mounts it, if that is automatic
            except FileNotFoundError:
                return None

    def _removed_empty(self, path: Path) -> bool:
        """Remove a directory without objects; return whether it is gone.

        A large object that is being written, or whose writer was killed, keeps the directory.
        """
        with storage_errors(path, "delete"):
            if _rmdir(path):
                return True
            temporaries = []
            with contextlib.suppress(FileNotFoundError), os.scandir(path) as scanned:
                for entry in scanned:
                    # Ends at the first other name: thousands of nodes delete their own shards.
                    if parse_temporary_name(entry.name) is None or entry.name.endswith(PART):
                        return False
                    temporaries.append(path / entry.name)
            for temporary in temporaries:
                _remove_hidden(temporary)  # a create that is not dead begins again
            return _rmdir(path)


def _rmdir(path: Path) -> bool:
    """Remove an empty directory; return False if it holds something or is a mount point."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise
        return False
    return True


def _decide(path: Path, data: bytes) -> None:
    """Give `path` the contents `data`, unless it has others: without hard links.

    A directory with the data is renamed to a name beside `path`. That fails if a directory with
    contents has the name, so one process decides. Then each process that meets the decision copies
    it to `path`, so a killed process leaves nothing undecided. `O_EXCL` would leave an empty file,
    and nobody could tell whether its maker is dead or slow.

    Raises:
        FileExistsError: another call has decided.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    decided = path.with_name(f".{path.name}{_DECIDED}")
    draft = path.with_name(temporary_name(path.name))
    draft.mkdir()
    try:
        write_new(draft / _OBJECT, data)
        sync_directory(draft)
        draft.rename(decided)
    except OSError as error:
        _remove_hidden(draft)
        # File systems differ in the error for a name that is taken. After an error that may pass,
        # this draft itself may have the name: the next attempt will tell.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) and (
            may_pass(error) or not decided.is_dir()
        ):
            raise
        replace_file(path, (decided / _OBJECT).read_bytes())
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
    replace_file(path, data)


def _is_hidden(name: str) -> bool:
    """Return whether `name` is one that only this store knows."""
    return parse_temporary_name(name) is not None or (
        name.startswith(".") and name.endswith(_DECIDED)
    )


def _remove_hidden(path: Path) -> None:
    """Remove a file with a temporary name, or a directory of `_decide`; it may be missing."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        # Renamed first: a directory of `_decide` is never seen empty, because an empty one is
        # replaced by the next draft.
        removed = path.with_name(temporary_name("removed"))
        with contextlib.suppress(FileNotFoundError):
            path.rename(removed)
            (removed / _OBJECT).unlink(missing_ok=True)
            removed.rmdir()


def _open_to_read(path: Path) -> int:
    """Return a descriptor of the file, as other nodes see it."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return open_nofollow(str(path), flags)
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            return _fresh(path.parent, lambda _: open_nofollow(str(path), flags))
        raise


def _fresh(directory: Path, look: Callable[[int], _T]) -> _T:
    """Return `look(fd)`, with a descriptor of `directory`.

    Opening the directory makes NFS ask its server for changes. Otherwise a file that was missing a
    moment ago would count as missing for up to a minute.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return look(fd)
    finally:
        os.close(fd)


def _entry(name: str, status: os.stat_result) -> Entry:
    mode = status.st_mode
    if stat.S_ISREG(mode):
        return Entry(name, status.st_size, "file")
    if stat.S_ISDIR(mode):
        return Entry(name, 0, "directory")
    return Entry(name, 0, "link" if stat.S_ISLNK(mode) else "other")


def _sized(entry: os.DirEntry[str]) -> Entry | None:
    """Return the entry with its size; None if it was removed meanwhile."""
    try:
        return _entry(entry.name, entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return None


def _unsized(entry: os.DirEntry[str]) -> Entry | None:
    """Return the entry as the directory has it, without a request for it alone."""
    if entry.is_symlink():
        kind: Kind = "link"
    elif entry.is_dir(follow_symlinks=False):
        kind = "directory"
    else:
        kind = "file" if entry.is_file(follow_symlinks=False) else "other"
    return Entry(entry.name, -1, kind)
