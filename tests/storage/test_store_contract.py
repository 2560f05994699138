"""Contract of `storage.store.Store`, tested for each store.

A backend's hooks bypass the store under test, so that its errors cannot hide. To add a store, write
its hooks and name it in `BACKENDS`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import pytest

from megatron_flashckpt.errors import AlreadyExistsError, StorageError
from megatron_flashckpt.storage import retrying_store
from megatron_flashckpt.storage.object_store import ObjectStore
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.retrying_store import RetryingStore
from megatron_flashckpt.storage.scatter_read import KeptFiles
from megatron_flashckpt.storage.store import Entry, Store
from megatron_flashckpt.storage.store_probe import probe_store
from tests.support.memory_store import MemoryStore
from tests.support.object_server import DROP, LOSE, SLOW_DOWN


class Backend(Protocol):
    """A store under test, with functions that bypass it."""

    store: Store
    refuses: str
    """Characters that the store keeps in no name."""

    def plant(self, name: str, data: bytes) -> None:
        """Write `data` under `name` without the store."""

    def contents(self) -> dict[str, bytes]:
        """Return all bytes by name; on a file system also files outside the root or hidden."""


class PosixBackend:
    """A root inside an outer directory, so that the tests see files written outside the root."""

    refuses = ""

    def __init__(self, outer: Path, request: pytest.FixtureRequest) -> None:
        self._outer = outer
        self._root = outer / "root"
        self.store: Store = PosixStore(self._root)

    def plant(self, name: str, data: bytes) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def contents(self) -> dict[str, bytes]:
        return {
            Path(os.path.relpath(path, self._root)).as_posix(): path.read_bytes()
            for path in self._outer.rglob("*")
            if path.is_file() and not path.parent.name.endswith(".decided")
        }


class LinklessBackend(PosixBackend):
    """The same on a file system without hard links (SMB, some FUSE, BeeGFS)."""

    def __init__(self, outer: Path, request: pytest.FixtureRequest) -> None:
        super().__init__(outer, request)

        def refuse(*args: object, **named: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        request.getfixturevalue("monkeypatch").setattr(os, "link", refuse)


class MemoryBackend:
    refuses = ""

    def __init__(self, outer: Path, request: pytest.FixtureRequest) -> None:
        self._memory = MemoryStore(str(outer))
        self.store: Store = self._memory

    def plant(self, name: str, data: bytes) -> None:
        self._memory.objects[name] = data

    def contents(self) -> dict[str, bytes]:
        return dict(self._memory.objects)


class FaultyStore:
    """Each call fails twice: before it has an effect, and after it, as if the answer were lost."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turns = threading.local()

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._store, verb)
        if not callable(method):
            return method

        def call(*args: Any, **named: Any) -> Any:
            turns = vars(self._turns).setdefault(verb, itertools.cycle(("fail", "lose", "work")))
            turn = next(turns)
            if turn == "fail" or (turn == "lose" and verb == "get_into"):
                raise StorageError(errno.ETIMEDOUT, "no answer")
            result = method(*args, **named)
            if turn == "lose":
                raise StorageError(errno.EIO, "lost answer")
            return result

        return call


def never_sleep(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("monkeypatch").setattr(retrying_store.time, "sleep", lambda _: None)


class FaultyBackend(MemoryBackend):
    def __init__(self, outer: Path, request: pytest.FixtureRequest) -> None:
        super().__init__(outer, request)
        never_sleep(request)
        self.store = RetryingStore(FaultyStore(self._memory))  # type: ignore[arg-type]


class ObjectBackend:
    """A prefix of a bucket of a real server (moto), inside an outer prefix."""

    refuses = "\\\n"
    url = "moto_url"

    def __init__(self, outer: Path, request: pytest.FixtureRequest) -> None:
        url = request.getfixturevalue(self.url)
        self.store: Store = ObjectStore(url)
        from obstore.store import from_url

        outer_url, _, self._root = url.rpartition("/")
        self._bucket = from_url(outer_url, config=self.past_the_proxy(request))

    def past_the_proxy(self, request: pytest.FixtureRequest) -> dict[str, str]:
        """Return settings of a client that bypasses a proxy, if there is one."""
        return {}

    def plant(self, name: str, data: bytes) -> None:
        self._bucket.put(f"{self._root}/{name}", data)

    def contents(self) -> dict[str, bytes]:
        listed = [stored["path"] for page in self._bucket.list() for stored in page]
        return {
            os.path.relpath(path, self._root): bytes(self._bucket.get(path).bytes())
            for path in listed
        }


class AzureBackend(ObjectBackend):
    url = "azure_url"


class SeaweedBackend(ObjectBackend):
    url = "s3_url"

    def past_the_proxy(self, request: pytest.FixtureRequest) -> dict[str, str]:
        return {"aws_endpoint": f"http://127.0.0.1:{request.getfixturevalue('s3_port')}"}


class FaultyObjectBackend(SeaweedBackend):
    """The same with requests that fail, as `FaultyStore` does; uploads in parts are left alone."""

    def __init__(self, outer: Path, request: pytest.FixtureRequest) -> None:
        super().__init__(outer, request)
        never_sleep(request)
        proxy = request.getfixturevalue("s3_proxy")
        self._faults = itertools.cycle((DROP, LOSE, SLOW_DOWN, None, None))
        proxy.fault_of = lambda method, path: None if "upload" in path else next(self._faults)
        self.store = RetryingStore(self.store)


BACKENDS: dict[str, Callable[[Path, pytest.FixtureRequest], Backend]] = {
    "posix": PosixBackend,
    "posix without links": LinklessBackend,
    "memory": MemoryBackend,
    "retrying": FaultyBackend,
    "s3": SeaweedBackend,
    "s3 with faults": FaultyObjectBackend,
    "moto": ObjectBackend,
    "azure": AzureBackend,
}
DATA = bytes(range(256)) * 40
#: Represents an absolute name inside the test's directory, where a faulty store does no harm.
ABSOLUTE = "absolute"
ESCAPES = ["", ABSOLUTE, "..", "../x", "a/../../x", "a/..", ".", "./x", "a//b", "a/", "a\0b"]


#: Backends that start a server.
SECOND_TIER = ("s3", "s3 with faults", "moto", "azure")


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.second_tier] if name in SECOND_TIER else [])
        for name in BACKENDS
    ]
)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return BACKENDS[request.param](tmp_path, request)


def names_in(store: Store, directory: str) -> list[str]:
    return [entry.name for entry in store.list(directory)]


def repetitions(backend: Backend) -> int:
    """Return how often a race is run: requests to a server take long."""
    return 3 if isinstance(backend, ObjectBackend) else 20


def seen_during(work: Callable[[], object], look: Callable[[], Iterable[bytes | None]]) -> set:
    """Return all that `look` sees while `work` runs, and once more afterwards."""
    done = threading.Event()
    seen: set[bytes | None] = set()

    def watch() -> None:
        last = False
        while not last:
            last = done.is_set()
            seen.update(look())

    with ThreadPoolExecutor() as pool:
        watching = pool.submit(watch)
        try:
            work()
        finally:
            done.set()
        watching.result()
    return seen


def get_or_none(store: Store, name: str) -> bytes | None:
    try:
        return store.get(name)
    except FileNotFoundError:
        return None


# ---------------------------------------------------------------------- create


def test_create_writes_the_data_under_a_name_that_does_not_exist(backend):
    expected = {f"iter_0000001/{number}": data for number, data in enumerate((b"", b"x", DATA))}
    for name, data in expected.items():
        backend.store.create(name, data)
        assert backend.store.get(name) == data
    assert backend.contents() == expected
    backend.plant("iter_0000001/planted", b"by another program")
    for name in ("iter_0000001/1", "iter_0000001/planted"):
        before = backend.contents()
        for _ in range(2):
            with pytest.raises(AlreadyExistsError, match=name) as caught:
                backend.store.create(name, b"second")
            assert caught.value.errno == errno.EEXIST
            assert isinstance(caught.value, FileExistsError)
        assert backend.contents() == before
        backend.store.delete([name])
        assert backend.store.stat(name) is None
        backend.store.create(name, b"a deleted name is created again")


def test_one_of_many_creates_wins_and_all_read_its_bytes(backend):
    bids = [bytes([65 + bid]) * 50_000 for bid in range(8)]

    def bid(data: bytes) -> tuple[bool, bytes]:
        try:
            backend.store.create("d/end", data)
        except AlreadyExistsError:
            return False, backend.store.get("d/end")
        return True, backend.store.get("d/end")

    with ThreadPoolExecutor(len(bids)) as pool:
        results = list(pool.map(bid, bids))
    (winner,) = (data for data, (won, _) in zip(bids, results, strict=True) if won)
    assert {read for _, read in results} == {winner}
    assert backend.contents() == {"d/end": winner}


def test_a_created_object_is_seen_whole_or_not_at_all(backend):
    names = [f"d/{number}" for number in range(repetitions(backend))]
    seen = seen_during(
        lambda: [backend.store.create(name, DATA * 10) for name in names],
        lambda: [get_or_none(backend.store, name) for name in names],
    )
    assert seen <= {None, DATA * 10}


# ---------------------------------------------------------------------- put


def test_put_replaces_the_old_contents(backend):
    for data in (b"something longer than one byte", b"", DATA, b"x"):
        backend.store.put("tracker.txt", data)
        assert backend.contents() == {"tracker.txt": data}


def test_a_put_is_seen_whole_or_not_at_all(backend):
    versions = [bytes([version]) * 100_000 for version in range(6)]
    backend.store.put("m", versions[0])
    with ThreadPoolExecutor() as pool:
        seen = seen_during(
            lambda: list(pool.map(lambda version: backend.store.put("m", version), versions)),
            lambda: [backend.store.get("m")],
        )
    assert seen <= set(versions)
    assert set(backend.contents()) == {"m"}


# ---------------------------------------------------------------------- reads


OFFSETS = (0, 1, 4095, len(DATA) - 1, len(DATA), len(DATA) + 1)
LENGTHS = (0, 1, 4097, len(DATA), len(DATA) + 1)


def test_get_returns_the_range_or_less_at_the_end(backend):
    backend.plant("f", DATA)
    for offset, nbytes in itertools.product(OFFSETS, LENGTHS):
        assert backend.store.get("f", offset, nbytes) == DATA[offset : offset + nbytes]
        assert backend.store.get("f", offset) == DATA[offset:]


def test_get_into_at_the_end_leaves_the_rest_of_the_buffer(backend):
    backend.plant("f", DATA)
    for offset, nbytes in itertools.product(OFFSETS, LENGTHS):
        buffer = bytearray(b"?" * (nbytes + 2))
        filled = backend.store.get_into("f", offset, [memoryview(buffer)[1 : 1 + nbytes]])
        expected = DATA[offset : offset + nbytes]
        assert filled == len(expected)
        assert bytes(buffer) == b"?" + expected + b"?" * (nbytes + 1 - filled)


def test_get_into_fills_parts_end_to_end_and_reports_the_bytes(backend):
    backend.plant("f", DATA)
    parts = [bytearray(b"?" * nbytes) for nbytes in (3, 0, len(DATA) // 2, 5, len(DATA))]
    seen: list[bytes] = []
    filled = backend.store.get_into(
        "f", 2, [memoryview(part) for part in parts], lambda part: seen.append(bytes(part))
    )
    assert filled == len(DATA) - 2
    assert b"".join(seen) == DATA[2:]
    assert b"".join(parts) == DATA[2:] + b"?" * (sum(map(len, parts)) - filled)


def test_a_file_kept_open_is_read_like_any_other(backend):
    kept = KeptFiles()
    names = [f"f{number}" for number in range(9)]
    for name in names:
        backend.plant(name, name.encode() * 99)
    for name in [*names, *reversed(names), names[0], names[0]]:
        data = bytearray(4)
        assert backend.store.get_into(name, 2, [memoryview(data)], kept=kept) == 4
        assert data == (name * 3).encode()[2:6]


def test_a_missing_object_is_a_file_not_found_error_with_its_name(backend):
    backend.plant("d/f", b"")
    for name in ("absent", "no/such/directory", "d/absent"):
        with pytest.raises(FileNotFoundError, match=name):
            backend.store.get(name)
        with pytest.raises(FileNotFoundError, match=name):
            backend.store.get_into(name, 0, [memoryview(bytearray(1))])


def test_stat_tells_size_and_kind(backend):
    backend.plant("d/full", DATA)
    backend.plant("d/empty", b"")
    assert backend.store.stat("d/full") == Entry("d/full", len(DATA), "file")
    assert backend.store.stat("d/empty") == Entry("d/empty", 0, "file")
    assert backend.store.stat("d") == Entry("d", 0, "directory")
    for name in ("absent", "d/absent", "absent/too"):
        assert backend.store.stat(name) is None


def test_list_returns_the_direct_entries_of_a_directory(backend):
    for directory in ("", "absent", "absent/too"):
        assert backend.store.list(directory) == []
    for name in ("a", "d/c", "d/b", "d/e/f", "dd/g"):
        backend.plant(name, name.encode())
    a, d, dd = backend.store.list("")
    assert (a, d, dd) == (
        Entry("a", 1, "file"),
        Entry("d", 0, "directory"),
        Entry("dd", 0, "directory"),
    )
    assert names_in(backend.store, "d") == ["b", "c", "e"]
    assert backend.store.list("d", sizes=False) == [
        Entry("b", -1, "file"),
        Entry("c", -1, "file"),
        Entry("e", -1, "directory"),
    ]
    assert backend.store.list("d/e") == [Entry("f", 5, "file")]


# ---------------------------------------------------------------------- delete


def test_delete_removes_these_objects_only(backend):
    for name in ("d/a", "d/ab", "d/b", "a", "e/x"):
        backend.plant(name, b"")
    backend.store.delete(iter(["d/a", "e/x", "d/b", "absent", "no/such/directory"]))
    assert set(backend.contents()) == {"d/ab", "a"}


def test_delete_removes_directories_that_became_empty(backend):
    if isinstance(backend, SeaweedBackend):
        # S3 has no directories. This server has, and keeps them for minutes.
        pytest.skip("SeaweedFS lists a prefix whose last object was deleted")
    for name in ("iter_1/a", "iter_1/b", "iter_10/a", "x/y/z"):
        backend.store.create(name, b"x")
    backend.store.delete(["iter_1/a", "x/y/z"])
    assert names_in(backend.store, "") == ["iter_1", "iter_10"]
    backend.store.delete(["iter_1/b"])
    assert names_in(backend.store, "") == ["iter_10"]


def test_objects_may_be_created_while_their_directory_is_deleted(backend):
    """The last object of a directory goes while another process creates the next one."""
    count = repetitions(backend)

    def come_and_go(worker: int) -> None:
        for number in range(count):
            name = f"d/{worker}-{number}"
            backend.store.create(name, b"x")
            backend.store.delete([name])
            writer = backend.store.writer(name, 1)
            writer.write_at(0, b"y")
            writer.finish()
            backend.store.delete([name])

    with ThreadPoolExecutor() as pool:
        list(pool.map(come_and_go, range(4)))
    assert backend.contents() == {}


# ---------------------------------------------------------------------- writers


def test_an_object_may_be_written_in_any_order(backend):
    writer = backend.store.writer("iter_0000001/shard", len(DATA))
    writer.write_at(5000, memoryview(DATA)[5000:])
    writer.write_at(0, DATA[:4096])
    writer.write_at(4096, DATA[4096:5000])
    writer.finish()
    assert backend.contents() == {"iter_0000001/shard": DATA}


def test_several_threads_may_write_and_read_one_object(backend):
    writer, data = backend.store.writer("f", len(DATA)), bytearray(len(DATA))

    def fill(at: int) -> int:
        return backend.store.get_into("f", at, [memoryview(data)[at : at + 512]])

    with ThreadPoolExecutor(8) as pool:
        starts = range(0, len(DATA), 512)
        list(pool.map(lambda at: writer.write_at(at, DATA[at : at + 512]), starts))
        writer.finish()
        assert backend.contents() == {"f": DATA}
        assert sum(pool.map(fill, starts)) == len(DATA)
    assert data == DATA


def test_an_empty_object_can_be_written(backend):
    backend.store.writer("f", 0).finish()
    assert backend.contents() == {"f": b""}


def test_an_object_that_exists_is_not_written_again(backend):
    for name, before in (("a", b""), ("b", DATA)):
        backend.plant(name, before)
        with pytest.raises(AlreadyExistsError):
            backend.store.writer(name, 3)
    assert backend.contents() == {"a": b"", "b": DATA}


def test_an_object_has_its_name_when_it_is_whole_and_takes_none_from_another(backend):
    writer = backend.store.writer("d/f", 3)
    writer.write_at(0, b"abc")
    backend.store.create("d/f", b"first")
    is_bucket = isinstance(backend, ObjectBackend)
    with contextlib.nullcontext() if is_bucket else pytest.raises(AlreadyExistsError):
        writer.finish()
    writer.abandon()
    assert backend.contents() == {"d/f": b"abc" if is_bucket else b"first"}


def test_an_object_that_is_being_written_is_not_seen_and_keeps_its_directory(backend):
    writer = backend.store.writer("d/f", len(DATA))
    writer.write_at(0, DATA)
    backend.store.create("d/other", b"x")
    assert names_in(backend.store, "d") == ["other"]
    backend.store.delete(["d/other"])
    assert backend.store.stat("d/f") is None
    writer.finish()
    assert backend.contents() == {"d/f": DATA}


def test_an_abandoned_object_leaves_nothing_behind_and_takes_no_more_bytes(backend):
    finished = backend.store.writer("d/finished", 3)
    finished.write_at(0, b"abc")
    finished.finish()
    for written in (b"", DATA[:100], DATA):
        writer = backend.store.writer("d/f", len(DATA))
        writer.write_at(0, written)
        writer.abandon()
        writer.abandon()
        for ended in (writer, finished):
            with pytest.raises(StorageError):
                ended.write_at(0, b"xyz")
        assert backend.contents() == {"d/finished": b"abc"}
        with pytest.raises(FileNotFoundError):
            backend.store.get("d/f")


# ---------------------------------------------------------------------- names


#: Calls with a name, by verb.
VERBS: dict[str, Callable[[Store, str], object]] = {
    "put": lambda store, name: store.put(name, b"planted"),
    "create": lambda store, name: store.create(name, b"planted"),
    "writer": lambda store, name: store.writer(name, 7),
    "get": lambda store, name: store.get(name),
    "get_into": lambda store, name: store.get_into(name, 0, [memoryview(bytearray(1))]),
    "stat": lambda store, name: store.stat(name),
    "delete": lambda store, name: store.delete(["a/b", name]),
    "make_durable": lambda store, name: store.make_durable(name),
    "list": lambda store, name: store.list(name or ".."),  # "" would be the root
}


def test_a_name_outside_the_root_is_refused(backend, tmp_path):
    backend.plant("a/b", b"stays")
    before = backend.contents()
    for verb, escape in itertools.product(VERBS, ESCAPES):
        with pytest.raises(StorageError, match="is not a name inside") as caught:
            VERBS[verb](backend.store, escape.replace(ABSOLUTE, f"{tmp_path}/x"))
        assert backend.store.place in str(caught.value), verb
        assert backend.contents() == before, verb


def test_odd_names_are_kept(backend):
    kept = set()
    for name in ("..x", "x..", "...", "a b", "ä", "a\\b", "-rf", "a#0", "a\nb"):
        if set(name) & set(backend.refuses):
            with pytest.raises(StorageError, match="keep no such name"):
                backend.store.create(f"d/{name}", DATA)
        else:
            backend.store.create(f"d/{name}", DATA)
            kept.add(name)
    assert set(names_in(backend.store, "d")) == kept
    assert backend.contents() == {f"d/{name}": DATA for name in kept}
    backend.store.delete(f"d/{name}" for name in kept)
    assert backend.contents() == {}


# ---------------------------------------------------------------------- probe


def test_the_probe_passes_and_leaves_one_object_for_other_nodes(backend):
    probe_store(backend.store, "flashckpt/probe/00003")
    assert list(backend.contents()) == ["flashckpt/probe/00003"]
    backend.store.delete(["flashckpt/probe/00003"])
    assert backend.contents() == {}


class Overwriting(MemoryStore):
    """A store whose `create` is not exclusive."""

    create = MemoryStore.put


class Late(MemoryStore):
    """A store that never lists an object."""

    def list(self, directory: str, *, sizes: bool = True) -> list[Entry]:
        return []


class Lasting(MemoryStore):
    """A store whose `put` leaves an object as it is."""

    def put(self, name: str, data: bytes) -> None:
        with contextlib.suppress(AlreadyExistsError):
            self.create(name, data)


class Appending(MemoryStore):
    """A store whose writers ignore positions."""

    def writer(self, name: str, nbytes: int) -> Any:
        writer, written = super().writer(name, nbytes), itertools.count(step=nbytes // 2)
        write_at = writer.write_at
        writer.write_at = lambda _, chunk: write_at(next(written), chunk)
        return writer


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        (Overwriting, "create a name once"),
        (Late, "list a new name"),
        (Lasting, "replace a name"),
        (Appending, "write a large object"),
    ],
)
def test_the_probe_names_what_a_store_cannot_do(kind: type[MemoryStore], action: str) -> None:
    with pytest.raises(StorageError, match=f"/there: this node cannot {action}") as caught:
        probe_store(kind("/there"), "flashckpt/probe/00003")
    assert caught.value.errno == errno.EIO
