"""A store in a dictionary, for tests of the catalog and for models of the commit."""

from __future__ import annotations

import builtins
import contextlib
import errno
import math
import threading
from collections.abc import Callable, Iterable, Sequence

from megatron_flashckpt.errors import AlreadyExistsError, StorageError
from megatron_flashckpt.storage.advice import FILES
from megatron_flashckpt.storage.scatter_read import KeptFiles, Seen
from megatron_flashckpt.storage.store import Entry, Kind, Pace, check_name, parent_of


class MemoryWriter:
    """See `storage.store.Writer`. The object appears with `finish`, as in a bucket."""

    def __init__(self, store: MemoryStore, name: str, nbytes: int) -> None:
        self._store = store
        self._name = name
        self._data: bytearray | None = bytearray(nbytes)

    def write_at(self, offset: int, chunk: bytes | memoryview) -> None:
        view = memoryview(chunk).cast("B")
        with self._store.lock:
            if self._data is None:
                raise StorageError(errno.EBADF, f"{self._store.place}/{self._name}: is closed")
            missing = offset + view.nbytes - len(self._data)
            self._data += bytes(max(missing, 0))
            self._data[offset : offset + view.nbytes] = view

    def finish(self) -> None:
        with self._store.lock:
            if self._data is None:
                raise StorageError(errno.EBADF, f"{self._store.place}/{self._name}: is closed")
            self._store.create(self._name, self._data)
            self._data = None

    def abandon(self) -> None:
        with self._store.lock:
            self._data = None


class MemoryStore:
    """See `storage.store.Store`. Directories are the prefixes of names."""

    advice = FILES
    in_order = False
    pace = Pace(shortest_s=0.02, longest_s=1.0, most_per_s=math.inf)

    def __init__(self, place: str = "memory:") -> None:
        self.objects: dict[str, bytes] = {}
        """Contents by name; may be changed while `lock` is held."""
        self.lock = threading.RLock()
        self.place = place

    def get(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        check_name(name, self.place)
        with self.lock:
            if name not in self.objects:
                raise FileNotFoundError(errno.ENOENT, "does not exist", f"{self.place}/{name}")
            return self.objects[name][offset : None if nbytes is None else offset + nbytes]

    def get_into(
        self,
        name: str,
        offset: int,
        parts: Sequence[memoryview],
        seen: Seen | None = None,
        kept: KeptFiles | None = None,
    ) -> int:
        data = memoryview(self.get(name, offset, sum(part.nbytes for part in parts)))
        filled = 0
        for part in parts:
            chunk = data[filled : filled + part.nbytes]
            part[: chunk.nbytes] = chunk
            filled += chunk.nbytes
            if seen is not None and chunk.nbytes:
                seen(part[: chunk.nbytes])
        return filled

    def put(self, name: str, data: bytes) -> None:
        check_name(name, self.place)
        with self.lock:
            self.objects[name] = bytes(data)

    def create(self, name: str, data: bytes) -> None:
        check_name(name, self.place)
        with self.lock:
            if name in self.objects:
                raise AlreadyExistsError(errno.EEXIST, f"{self.place}/{name}: exists already")
            self.objects[name] = bytes(data)

    def writer(self, name: str, nbytes: int) -> MemoryWriter:
        check_name(name, self.place)
        if name in self.objects:
            raise AlreadyExistsError(errno.EEXIST, f"{self.place}/{name}: exists already")
        return MemoryWriter(self, name, nbytes)

    def stat(self, name: str) -> Entry | None:
        check_name(name, self.place)
        entries = self.list(parent_of(name))
        base = name.rpartition("/")[2]
        for entry in entries:
            if entry.name == base:
                return entry._replace(name=name)
        return None

    def list(self, directory: str, *, sizes: bool = True) -> builtins.list[Entry]:
        if directory:
            check_name(directory, self.place)
        prefix = f"{directory}/" if directory else ""
        entries: dict[str, Entry] = {}
        with self.lock:
            for name, data in self.objects.items():
                if name.startswith(prefix):
                    base, _, below = name[len(prefix) :].partition("/")
                    kind: Kind = "directory" if below else "file"
                    nbytes = len(data) if kind == "file" else 0
                    entries[base] = Entry(base, nbytes if sizes else -1, kind)
        return sorted(entries.values())

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        for name in names:
            check_name(name, self.place)
        with self.lock:
            for name in names:
                with contextlib.suppress(KeyError):
                    del self.objects[name]

    def discard_unfinished(self, directory: str, is_dead: Callable[[str], bool]) -> None:
        pass

    def make_durable(self, name: str) -> None:
        check_name(name, self.place)
