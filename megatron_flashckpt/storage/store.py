"""The contract of a store: named byte strings below one root, on a file system or in a bucket.

Names are relative, `/`-separated, and never leave the root. A store may refuse a name with a
backslash or a control character. A name that others rely on is created once and never replaced, so
writers that are late or doubled cannot change what was decided.

Every method may be called from several threads. Failures are `StorageError` (with errno) or
`FileNotFoundError`; the message names the object and what to do.
"""

from __future__ import annotations

import builtins
import errno
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

from megatron_flashckpt.errors import CorruptCheckpointError, StorageError
from megatron_flashckpt.storage.advice import Advice
from megatron_flashckpt.storage.scatter_read import KeptFiles, Seen

#: Type of an entry. `link`: a symbolic link, whatever its target. `other`: a pipe or a device.
Kind = Literal["file", "directory", "link", "other"]


class Entry(NamedTuple):
    """One name in a store."""

    name: str
    """The name that was asked for; in a listing, relative to the listed directory."""
    nbytes: int
    """Size in bytes; 0 unless `kind` is `file`; -1 in a listing without sizes."""
    kind: Kind


class Pace(NamedTuple):
    """Pauses between two questions of nodes that wait for a name."""

    shortest_s: float
    """First pause of a node, in seconds; the next ones double."""
    longest_s: float
    """Longest pause of a node, in seconds, in a job of few nodes."""
    most_per_s: float
    """Requests per second that all nodes of a job together may send."""

    def idle_s(self, nodes: float) -> float:
        """Return the pause between two looks of a node at what people may ask for at any time.

        Six times the longest pause of a wait; in a large job a fiftieth of its requests per second.
        """
        return max(6 * self.longest_s, 50 * nodes / self.most_per_s)


class Writer(Protocol):
    """One large object being written. It gets its name when it is whole."""

    def write_at(self, offset: int, chunk: bytes | memoryview) -> None:
        """Write `chunk` at `offset`. Threads may write disjoint parts at the same time."""

    def finish(self) -> None:
        """Give the object its name, once every byte is durable; the name is durable, too, then.

        If this call fails, the object may exist nevertheless, whole.

        Raises:
            AlreadyExistsError: the name exists, perhaps of an earlier attempt; it is not changed.
                Buckets, and file systems without hard links, do not tell this of a name that comes
                at the same moment: a whole object takes the place of another one.
        """

    def abandon(self) -> None:
        """Free the space of what has no name yet; never raises."""


class Store(Protocol):
    """A tree of named byte strings."""

    @property
    def place(self) -> str:
        """The root, for messages."""

    @property
    def advice(self) -> Advice:
        """Advice of messages about this kind of store."""

    @property
    def pace(self) -> Pace:
        """The pace of waiting nodes, which this kind of store bears, or which its requests cost."""

    @property
    def in_order(self) -> bool:
        """True: a writer keeps what is written behind a gap in memory until the gap is filled."""

    def get(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return `nbytes` from `offset` (default: all); fewer only at the end of the object."""

    def get_into(
        self,
        name: str,
        offset: int,
        parts: Sequence[memoryview],
        seen: Seen | None = None,
        kept: KeptFiles | None = None,
    ) -> int:
        """Fill `parts`, end to end, from `offset`; see `storage.scatter_read.read_parts`.

        Args:
            kept: keeps the file open for the next read; the object must not be replaced meanwhile.
        """

    def put(self, name: str, data: bytes) -> None:
        """Replace the contents of `name` with `data` atomically; both are durable afterwards.

        Only for the few small names that are meant to change: tracker, `tracker.json`, `alive`.
        """

    def create(self, name: str, data: bytes) -> None:
        """Create a small object once; it is whole and durable afterwards.

        Readers never get a part of it. If this call fails in another way than by
        `AlreadyExistsError`, the object may exist nevertheless. So whoever needs to know what the
        name says reads it back.

        Raises:
            AlreadyExistsError: the name exists, whoever made it. Perhaps this call did, in an
                attempt whose answer was lost. The object is whole, but only `make_durable` makes
                its name durable for this caller.
        """

    def writer(self, name: str, nbytes: int) -> Writer:
        """Start writing an object of `nbytes`.

        Raises:
            AlreadyExistsError: the name exists, whoever made it. The object is whole, but only
                `make_durable` makes its name durable for this caller.
        """

    def stat(self, name: str) -> Entry | None:
        """Return the entry of `name` without following a link; None if it is missing."""

    def list(self, directory: str, *, sizes: bool = True) -> builtins.list[Entry]:
        """Return the entries directly in `directory` ("": the root), sorted by name.

        A missing directory is empty. Names under which a store writes incomplete objects are left
        out. A directory that is a link is listed through the link, because a person may have
        branched a checkpoint by one; nothing is written or deleted through a link.

        Args:
            sizes: False spares a file system one request per entry; `nbytes` is then -1.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, then their directories if these are empty; never the root.

        A missing object is no error. After an error some objects may be left.
        """

    def discard_unfinished(self, directory: str, is_dead: Callable[[str], bool]) -> None:
        """Delete what killed processes have left of objects that they were writing.

        A writer that was not dead begins again.

        Args:
            is_dead: returns whether nobody writes the object of this name, relative to `directory`,
                any more.
        """

    def make_durable(self, name: str) -> None:
        """Make the name of an existing object durable, whoever created it.

        A caller that acts on an object of another process calls this first: the other one may have
        died between creating the name and making it durable.
        """


def read_whole(store: Store, name: str, limit: int) -> bytes:
    """Return the contents of an object that never has more than `limit` bytes.

    Raises:
        FileNotFoundError: the object is missing.
        CorruptCheckpointError: the object is larger (a sparse file can claim any size).
    """
    entry = store.stat(name)
    if entry is not None and entry.nbytes > limit:
        raise CorruptCheckpointError(
            f"{store.place}/{name}: {entry.nbytes} bytes long, but such an object has at most "
            f"{limit}; this package did not write it"
        )
    return store.get(name)


def check_name(name: str, place: str) -> None:
    """Raise StorageError unless `name` is the name of an object inside the store at `place`."""
    parts = name.split("/")
    if not all(parts) or any(part in (".", "..") for part in parts) or "\0" in name:
        raise StorageError(errno.EINVAL, f"{name!r} is not a name inside {place}")


def parent_of(name: str) -> str:
    """Return the directory of `name`; empty for a name directly in the root."""
    return name.rpartition("/")[0]
