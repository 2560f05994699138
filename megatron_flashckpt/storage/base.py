"""What a storage must do. Names are relative, `/`-separated, and never leave the root.

Every method may be called from several threads. Failures are `StorageError` (with errno) or
`FileNotFoundError`; the message names the file and what to do.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.storage.scatter_read import KeptFiles, Seen

#: What a name stands for. `other`: a symbolic link (whatever it leads to), a pipe, a device.
Kind = Literal["file", "directory", "other"]

#: `name`: the bytes, under that name. `contents`: the bytes, and the name with the next one in the
#: same directory. `nothing`: whoever looks finds all of it, but power that is lost may take it.
Durable = Literal["name", "contents", "nothing"]

_PROBE = "flashckpt-probe-"
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")


def temporary_name(name: str) -> str:
    """Return a name, unlike all others, for what is to become file `name` once it is complete."""
    return f".{name}.{uuid.uuid4().hex[:8]}.tmp"


def parse_temporary_name(name: str) -> str | None:
    """Return what a file would have been called, had a crash not cut it short; None: not one."""
    match = _TEMPORARY.fullmatch(name)
    return match and match[1]


def probe_name(rank: int) -> str:
    """Return the name of a file with which the node of `rank` tries out the save directory."""
    return temporary_name(f"{_PROBE}{rank:05d}")


def is_probe(name: str) -> bool:
    """Return whether a file is one that `probe_name` named."""
    return (parse_temporary_name(name) or "").startswith(_PROBE)


class Stamp(NamedTuple):
    """What tells a file from one that has replaced it, or from itself before it was changed."""

    nbytes: int
    mtime_ns: int
    inode: int


class Writer(Protocol):
    """One file being written; nothing of it counts before `finish` has returned."""

    def write_at(self, offset: int, chunk: bytes | memoryview) -> None:
        """Write `chunk` at `offset`; may be called from several threads for parts of their own."""

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
        """Make `name` hold `data`: atomically, replacing what was there.

        Args:
            durable: what no loss of power takes away when this returns. A process that is killed
                takes nothing.
            guard: called right before `name` is replaced; if it raises, nothing has changed.
        """

    def rewrite(self, name: str, expected: bytes, data: bytes) -> bool:
        """Overwrite `expected`, all that file `name` holds, with `data`, which is as long.

        A file that another process puts in its place meanwhile stays as it is. Returns False if
        `name` holds something else, or is not there. Readers may see a mixture of both for a
        moment; a loss of power may take `data` away.
        """

    def create(self, name: str, nbytes: int) -> Writer:
        """Start writing a file of `nbytes`; whatever had that name is replaced."""

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
            kept: where the file may stay open; it is not to be replaced meanwhile.
        """

    def size(self, name: str) -> int:
        """Return the bytes of `name`."""

    def stamp(self, name: str) -> Stamp:
        """Return the stamp of the file `name` as it is now; a link is not followed."""

    def list(self, directory: str) -> list[str]:
        """Return the names directly in `directory`; empty if it does not exist."""

    def present(self, directory: str, names: Iterable[str]) -> set[str]:
        """Return which of `names` are in `directory` ("": the root) now, as other nodes left it.

        Without a look at what else is there: of thousands of files, by thousands of nodes.
        """

    def delete(self, name: str) -> None:
        """Remove a file; not an error if it is not there."""

    def kind(self, name: str) -> Kind | None:
        """Return what `name` is, links not followed; None if it is not there."""

    def move(self, name: str, to: str) -> None:
        """Let the file `name` be called `to`, durably; at no moment is it under neither name."""

    def delete_directory(self, name: str) -> None:
        """Remove an empty directory; not an error if it is not there or not empty."""


def read_whole(storage: Storage, name: str, limit: int) -> bytes:
    """Return the contents of a file that never has more than `limit` bytes.

    Raises:
        CorruptCheckpointError: it claims to have more (a sparse file may claim anything).
    """
    nbytes = storage.size(name)
    if nbytes > limit:
        raise CorruptCheckpointError(
            f"{storage.place}/{name}: {nbytes} bytes long, which no such file is (at most "
            f"{limit}); it was not written by this package"
        )
    return storage.read(name)
