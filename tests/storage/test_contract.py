"""Contract of `storage.base.Storage`, tested for each backend.

A backend's hooks bypass the storage under test, so that its errors cannot hide. To add a backend,
write its hooks and name it in `BACKENDS`.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest

from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.storage.base import Storage
from megatron_flashckpt.storage.patient import RetryingStorage
from megatron_flashckpt.storage.posix import PosixStorage
from megatron_flashckpt.storage.scatter_read import KeptFiles


class Backend(Protocol):
    """A storage under test, with functions that bypass it."""

    storage: Storage

    def plant(self, name: str, data: bytes) -> None:
        """Write `data` under `name` without the storage."""

    def contents(self) -> dict[str, bytes]:
        """Return the bytes of all files by name, including files outside the storage's root."""


class PosixBackend:
    """A root inside an outer directory, so that the tests see files written outside the root."""

    def __init__(self, outer: Path) -> None:
        self._outer = outer
        self._root = outer / "root"
        self.storage: Storage = PosixStorage(self._root)

    def plant(self, name: str, data: bytes) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def contents(self) -> dict[str, bytes]:
        return {
            Path(os.path.relpath(path, self._root)).as_posix(): path.read_bytes()
            for path in self._outer.rglob("*")
            if path.is_file()
        }


class RetryingBackend(PosixBackend):
    """The same directory through the storage that loads use."""

    def __init__(self, outer: Path) -> None:
        super().__init__(outer)
        self.storage = RetryingStorage(self.storage)


BACKENDS = {"posix": PosixBackend, "patient": RetryingBackend}
DATA = bytes(range(256)) * 40
#: Represents an absolute name inside the test's directory, where a faulty storage does no harm.
ABSOLUTE = "absolute"
ESCAPES = ["", ABSOLUTE, "..", "../x", "a/../../x", "a/..", ".", "./x", "a//b", "a/", "a\0b"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return BACKENDS[request.param](tmp_path)


def test_put_writes_the_data_and_no_other_file(backend):
    backend.storage.put("iter_0000001/manifest.json", DATA)
    assert backend.contents() == {"iter_0000001/manifest.json": DATA}
    assert backend.storage.read("iter_0000001/manifest.json") == DATA


@pytest.mark.parametrize("data", [b"", b"x", DATA])
def test_put_replaces_the_old_contents(backend, data):
    backend.plant("tracker.txt", b"something longer than one byte")
    backend.storage.put("tracker.txt", data)
    assert backend.contents() == {"tracker.txt": data}


def test_a_put_is_seen_whole_or_not_at_all(backend):
    versions = [bytes([version]) * 100_000 for version in range(6)]
    backend.storage.put("m", versions[0])
    done = threading.Event()
    seen = set()

    def watch() -> None:
        last = False
        while not last:  # reads once more after the last put
            last = done.is_set()
            seen.add(backend.storage.read("m"))

    with ThreadPoolExecutor() as pool:
        watching = pool.submit(watch)
        try:
            list(pool.map(lambda version: backend.storage.put("m", version), versions))
        finally:
            done.set()
        watching.result()
    assert seen <= set(versions)
    assert set(backend.contents()) == {"m"}


def test_a_put_refused_by_its_guard_changes_nothing(backend):
    backend.plant("tracker.txt", b"5")

    def refuse() -> None:
        assert backend.storage.read("tracker.txt") == b"5", "the guard runs before the write"
        raise ValueError("not now")

    with pytest.raises(ValueError, match="not now"):
        backend.storage.put("tracker.txt", b"2", guard=refuse)
    assert backend.contents() == {"tracker.txt": b"5"}


def test_a_rewrite_replaces_the_expected_contents(backend):
    backend.plant("claim", b"mine 1")
    assert backend.storage.rewrite("claim", b"mine 1", b"mine 2")
    assert backend.contents() == {"claim": b"mine 2"}


@pytest.mark.parametrize("stored", [b"theirs", b"mine", b"mine 1 and more", b"", None])
def test_a_rewrite_leaves_unexpected_contents(backend, stored):
    if stored is not None:
        backend.plant("claim", stored)
    assert not backend.storage.rewrite("claim", b"mine 1", b"mine 2")
    assert backend.contents() == ({} if stored is None else {"claim": stored})


@pytest.mark.parametrize("offset", [0, 1, 4095, len(DATA) - 1, len(DATA), len(DATA) + 1])
@pytest.mark.parametrize("nbytes", [None, 0, 1, 4097, len(DATA), len(DATA) + 1])
def test_read_returns_the_range_or_less_at_the_end(backend, offset, nbytes):
    backend.plant("f", DATA)
    end = None if nbytes is None else offset + nbytes
    assert backend.storage.read("f", offset, nbytes) == DATA[offset:end]


@pytest.mark.parametrize("offset", [0, 1, 4095, len(DATA) - 1, len(DATA), len(DATA) + 1])
@pytest.mark.parametrize("nbytes", [0, 1, 4097, len(DATA), len(DATA) + 1])
def test_read_into_at_the_end_leaves_the_rest_of_the_buffer(backend, offset, nbytes):
    backend.plant("f", DATA)
    buffer = bytearray(b"?" * (nbytes + 2))
    filled = backend.storage.read_into("f", offset, [memoryview(buffer)[1 : 1 + nbytes]])
    expected = DATA[offset : offset + nbytes]
    assert filled == len(expected)
    assert bytes(buffer) == b"?" + expected + b"?" * (nbytes + 1 - filled)


def test_a_file_kept_open_is_read_like_any_other(backend):
    kept = KeptFiles()
    names = [f"f{number}" for number in range(9)]
    for name in names:
        backend.plant(name, name.encode() * 99)
    for name in [*names, *reversed(names), names[0], names[0]]:
        data = bytearray(4)
        assert backend.storage.read_into(name, 2, [memoryview(data)], kept=kept) == 4
        assert data == (name * 3).encode()[2:6]
    with pytest.raises(FileNotFoundError):
        backend.storage.read_into("missing", 0, [memoryview(bytearray(1))], kept=kept)


def test_files_kept_open_are_closed_with_their_holder(tmp_path):
    storage, kept = PosixStorage(tmp_path), KeptFiles()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        (tmp_path / f"{number}").write_bytes(DATA)
        storage.read_into(f"{number}", 0, [memoryview(bytearray(1))], kept=kept)
        assert len(os.listdir("/proc/self/fd")) <= before + 4
    del kept
    assert len(os.listdir("/proc/self/fd")) == before


def test_read_into_fills_parts_end_to_end_and_reports_the_bytes(backend):
    backend.plant("f", DATA)
    parts = [bytearray(b"?" * nbytes) for nbytes in (3, 0, len(DATA) // 2, 5, len(DATA))]
    seen: list[bytes] = []
    filled = backend.storage.read_into(
        "f", 2, [memoryview(part) for part in parts], lambda part: seen.append(bytes(part))
    )
    assert filled == len(DATA) - 2
    assert b"".join(seen) == DATA[2:]
    assert b"".join(parts) == DATA[2:] + b"?" * (sum(map(len, parts)) - filled)


def test_several_threads_may_read_one_file(backend):
    backend.plant("f", DATA)
    data = bytearray(len(DATA))

    def fill(at: int) -> int:
        return backend.storage.read_into("f", at, [memoryview(data)[at : at + 512]])

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(fill, range(0, len(DATA), 512))) == len(DATA)
    assert data == DATA


def test_size_is_the_number_of_bytes(backend):
    backend.plant("d/full", DATA)
    backend.plant("d/empty", b"")
    assert backend.storage.size("d/full") == len(DATA)
    assert backend.storage.size("d/empty") == 0


@pytest.mark.parametrize(
    "operation",
    [
        lambda storage, name: storage.read(name),
        lambda storage, name: storage.read_into(name, 0, [memoryview(bytearray(1))]),
        lambda storage, name: storage.size(name),
    ],
    ids=["read", "read_into", "size"],
)
@pytest.mark.parametrize("name", ["absent", "no/such/directory", "d/absent"])
def test_a_missing_file_is_a_file_not_found_error_with_its_name(backend, operation, name):
    backend.plant("d/f", b"")
    with pytest.raises(FileNotFoundError, match=name):
        operation(backend.storage, name)


def test_list_names_the_direct_entries_of_a_directory(backend):
    for name in ("a", "d/b", "d/c", "d/e/f", "dd/g"):
        backend.plant(name, b"")
    assert sorted(backend.storage.list("")) == ["a", "d", "dd"]
    assert sorted(backend.storage.list("d")) == ["b", "c", "e"]
    assert backend.storage.list("d/e") == ["f"]


@pytest.mark.parametrize("directory", ["", "absent", "absent/too"])
def test_a_directory_that_does_not_exist_is_empty(backend, directory):
    assert backend.storage.list(directory) == []


def test_delete_removes_that_file_only(backend):
    for name in ("d/a", "d/ab", "a"):
        backend.plant(name, b"")
    backend.storage.delete("d/a")
    assert set(backend.contents()) == {"d/ab", "a"}


@pytest.mark.parametrize("name", ["absent", "no/such/directory"])
def test_deleting_a_missing_file_is_no_error(backend, name):
    backend.plant("f", b"")
    backend.storage.delete(name)
    assert set(backend.contents()) == {"f"}


def test_delete_directory_removes_only_an_empty_directory(backend):
    for name in ("iter_1/a", "iter_10/a", "xiter_1/a", "a"):
        backend.plant(name, b"")
    backend.storage.delete_directory("iter_1")
    assert set(backend.contents()) == {"iter_1/a", "iter_10/a", "xiter_1/a", "a"}, (
        "the directory was not empty"
    )
    backend.storage.delete("iter_1/a")
    backend.storage.delete_directory("iter_1")
    backend.storage.delete_directory("iter_1")
    assert set(backend.contents()) == {"iter_10/a", "xiter_1/a", "a"}
    assert "iter_1" not in backend.storage.list("")


def test_kind_distinguishes_directories_files_and_missing_names(backend):
    backend.plant("iter_1/a", b"")
    kinds = [backend.storage.kind(name) for name in ("iter_1", "iter_1/a", "iter_2", "iter_1/b")]
    assert kinds == ["directory", "file", None, None]


def test_present_returns_the_names_that_exist_now(backend):
    names = ["a", "b", "c"]
    assert backend.storage.present("iter_1", names) == set()
    backend.plant("iter_1/a", b"")
    backend.plant("iter_1/c/inside", b"")
    backend.plant("b", b"")
    assert backend.storage.present("iter_1", names) == {"a", "c"}
    backend.plant("iter_1/b", b"")
    backend.storage.delete("iter_1/a")
    assert backend.storage.present("iter_1", names) == {"b", "c"}
    assert backend.storage.present("iter_1", []) == set()
    assert backend.storage.present("", names) == {"b"}


def test_a_moved_file_has_only_its_new_name(backend):
    backend.plant("iter_1/manifest", DATA)
    backend.plant("gone", b"what had that name")
    backend.storage.move("iter_1/manifest", "gone")
    assert backend.contents() == {"gone": DATA}
    with pytest.raises(FileNotFoundError):
        backend.storage.move("iter_1/manifest", "gone")
    assert backend.contents() == {"gone": DATA}


def test_a_file_may_be_written_in_any_order(backend):
    writer = backend.storage.create("iter_0000001/shard", len(DATA))
    writer.write_at(5000, memoryview(DATA)[5000:])
    writer.write_at(0, DATA[:4096])
    writer.write_at(4096, DATA[4096:5000])
    writer.finish()
    assert backend.contents() == {"iter_0000001/shard": DATA}


def test_several_threads_may_write_one_file(backend):
    writer = backend.storage.create("f", len(DATA))
    with ThreadPoolExecutor(8) as pool:
        starts = range(0, len(DATA), 512)
        list(pool.map(lambda at: writer.write_at(at, DATA[at : at + 512]), starts))
    writer.finish()
    assert backend.contents() == {"f": DATA}


@pytest.mark.parametrize("before", [b"", DATA * 2])
def test_create_replaces_an_existing_file(backend, before):
    backend.plant("f", before)
    writer = backend.storage.create("f", 3)
    writer.write_at(0, b"new")
    writer.finish()
    assert backend.contents() == {"f": b"new"}


def test_an_empty_file_can_be_created(backend):
    backend.storage.create("f", 0).finish()
    assert backend.contents() == {"f": b""}


@pytest.mark.parametrize("written", [b"", DATA[:100], DATA])
def test_an_abandoned_file_leaves_nothing_behind(backend, written):
    backend.plant("d/other", b"")
    writer = backend.storage.create("d/f", len(DATA))
    writer.write_at(0, written)
    writer.abandon()
    assert set(backend.contents()) == {"d/other"}
    with pytest.raises(FileNotFoundError):
        backend.storage.read("d/f")


def test_abandoning_never_raises(backend):
    writer = backend.storage.create("d/f", 3)
    backend.storage.delete("d/f")
    writer.abandon()
    writer.abandon()
    assert backend.contents() == {}


def test_an_abandoned_or_finished_writer_takes_no_more_bytes(backend):
    finished = backend.storage.create("finished", 3)
    finished.write_at(0, b"abc")
    finished.finish()
    abandoned = backend.storage.create("abandoned", 3)
    abandoned.abandon()
    for writer in (finished, abandoned):
        with pytest.raises(StorageError):
            writer.write_at(0, b"xyz")
    assert backend.contents() == {"finished": b"abc"}


def test_writers_of_two_names_are_independent(backend):
    one, other = backend.storage.create("one", 1), backend.storage.create("other", 1)
    other.write_at(0, b"2")
    one.write_at(0, b"1")
    one.finish()
    other.abandon()
    assert backend.contents() == {"one": b"1"}


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize(
    "operation",
    [
        lambda storage, name: storage.put(name, b"planted"),
        lambda storage, name: storage.create(name, 7),
        lambda storage, name: storage.read(name),
        lambda storage, name: storage.read_into(name, 0, [memoryview(bytearray(1))]),
        lambda storage, name: storage.size(name),
        lambda storage, name: storage.delete(name),
        lambda storage, name: storage.kind(name),
        lambda storage, name: storage.present(name or "..", ["b"]),  # "" would be the root
        lambda storage, name: storage.present("a", [name]),
        lambda storage, name: storage.move("a/b", name),
        lambda storage, name: storage.move(name, "x"),
        lambda storage, name: storage.delete_directory(name),
        lambda storage, name: storage.list(name or ".."),  # "" would be the root
        lambda storage, name: storage.rewrite(name, b"stays", b"other"),
    ],
    ids=(
        "put create read read_into size delete kind present-in present move-to move "
        "delete_directory list rewrite"
    ).split(),
)
def test_a_name_outside_the_root_is_refused(backend, tmp_path, operation, name):
    name = f"{tmp_path}/x" if name == ABSOLUTE else name
    backend.plant("a/b", b"stays")
    before = backend.contents()
    with pytest.raises(StorageError, match="is not a name inside") as caught:
        operation(backend.storage, name)
    assert backend.storage.place in str(caught.value)
    assert backend.contents() == before


@pytest.mark.parametrize("name", ["..x", "x..", "...", "a b", "ä", "a\\b", "-rf", "a#0", "a\nb"])
def test_odd_names_are_allowed(backend, name):
    backend.storage.put(f"d/{name}", DATA)
    assert backend.storage.list("d") == [name]
    assert backend.contents() == {f"d/{name}": DATA}
    backend.storage.delete(f"d/{name}")
    assert backend.contents() == {}


def test_a_stamp_distinguishes_a_file_from_its_replacement(backend: Backend) -> None:
    backend.storage.put("a/b", DATA)
    stamp = backend.storage.stamp("a/b")
    assert stamp.nbytes == len(DATA)
    assert backend.storage.stamp("a/b") == stamp
    backend.storage.put("a/b", DATA)
    assert backend.storage.stamp("a/b") != stamp
    with pytest.raises(FileNotFoundError):
        backend.storage.stamp("a/c")
