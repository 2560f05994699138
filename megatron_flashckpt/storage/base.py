"""The contract of a storage. Names are relative, `/`-separated, and never leave the root.

Every method may be called from several threads. Failures are `StorageError` (with errno) or
`FileNotFoundError`; the message names the file and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.storage.posix_files import parse_temporary_name as parse_temporary_name
from megatron_flashckpt.storage.posix_files import temporary_name as temporary_name
from megatron_flashckpt.storage.scatter_read import KeptFiles, Seen

#: Type of an entry. `other`: a symbolic link (whatever its target), a pipe, or a device.
Kind = Literal["file", "directory", "other"]

#: Durability of a write. `name`: data and directory entry are fsynced. `contents`: data is fsynced;
#: the directory entry becomes durable with the directory's next fsync. `nothing`: no fsync; the
#: file survives a killed process, but not a power loss.
Durable = Literal["name", "contents", "nothing"]

_PROBE = "flashckpt-probe-"


def probe_name(rank: int) -> str:
    """Return the name of a file with which the node of `rank` tests the save directory."""
    return temporary_name(f"{_PROBE}{rank:05d}")


def is_probe(name: str) -> bool:
    """Return whether `probe_name` made `name`."""
    return (parse_temporary_name(name) or "").startswith(_PROBE)


class Stamp(NamedTuple):
    """Identity of a file's contents: differs if the file was replaced or changed."""

    nbytes: int
    mtime_ns: int
    inode: int


class Writer(Protocol):
    """One file being written; its contents do not count before `finish` has returned."""

    def write_at(self, offset: int, chunk: bytes | memoryview) -> None:
        """Write `chunk` at `offset`. Threads may write disjoint parts at the same time."""

    def finish(self) -> None:
        """Return when every byte written is durable."""

    def abandon(self) -> None:
        """Remove the file and free its space; never raises."""


class Storage(Protocol):
    """A tree of named byte strings."""

    @property
    def place(self) -> str:
        """The root, for messages."""

    def put(
        self,
        name: str,
        data: bytes,
        durable: Durable = "name",
        guard: Callable[[], None] | None = None,
    ) -> None:
        """Replace the contents of `name` with `data` atomically.

        Args:
            durable: how much survives a power loss when this returns. A killed process loses
                nothing.
            guard: called right before `name` is replaced; if it raises, nothing has changed.
        """

    def rewrite(self, name: str, expected: bytes, data: bytes) -> bool:
        """Overwrite file `name`, if it holds exactly `expected`, with `data` of the same length.

        A file that another process renames to `name` meanwhile is not changed. Returns False if
        `name` is missing or holds other bytes. Readers may see a mixture of both for a moment, and
        a power loss may undo the write.
        """

    def create(self, name: str, nbytes: int) -> Writer:
        """Start writing a file of `nbytes`; an existing file of that name is replaced."""

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return `nbytes` from `offset` (default: all); fewer only at the end of the file."""

    def read_into(
        self,
        name: str,
        offset: int,
        parts: Sequence[memoryview],
        seen: Seen | None = None,
        kept: KeptFiles | None = None,
    ) -> int:
        """Fill `parts`, end to end, from `offset`; see `storage.scatter_read.read_parts`.

        Args:
            kept: keeps the file open for the next read; the file must not be replaced meanwhile.
        """

    def size(self, name: str) -> int:
        """Return the size of `name` in bytes."""

    def stamp(self, name: str) -> Stamp:
        """Return the current stamp of the file `name`, without following a link."""

    def list(self, directory: str) -> list[str]:
        """Return the names directly in `directory`; empty if it does not exist."""

    def present(self, directory: str, names: Iterable[str]) -> set[str]:
        """Return those of `names` that are in `directory` ("": the root), as other nodes see it.

        Does not list the directory: thousands of nodes ask for thousands of files each.
        """

    def delete(self, name: str) -> None:
        """Remove a file; a missing file is not an error."""

    def kind(self, name: str) -> Kind | None:
        """Return the type of `name` without following links; None if it is missing."""

    def move(self, name: str, to: str) -> None:
        """Rename file `name` to `to`, durably; one of the two names exists at every moment."""

    def delete_directory(self, name: str) -> None:
        """Remove an empty directory; a missing or non-empty directory is not an error."""


def read_whole(storage: Storage, name: str, limit: int) -> bytes:
    """Return the contents of a file that never has more than `limit` bytes.

    Raises:
        CorruptCheckpointError: the file is larger (a sparse file can claim any size).
    """
    nbytes = storage.size(name)
    if nbytes > limit:
        raise CorruptCheckpointError(
            f"{storage.place}/{name}: {nbytes} bytes long, but such a file has at most {limit}; "
            "this package did not write it"
        )
    return storage.read(name)
