"""Direct writes, which bypass the page cache and are given up if they are refused or slow.

The tests use their own file system and make system calls of the writer fail.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.storage.direct_io import ALIGNMENT, DirectIo, DirectMode
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.processes import nothing_left_open

MIB = 2**20


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


class WriteCalls:
    """A record of the calls of `os.pwrite`, with a function that can change their results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.direct: list[bool] = []
        self.act: Callable[[bool], int | None] = lambda direct: None
        """Called before every write; returns the most bytes to write, or None for no limit."""
        pwrite = os.pwrite

        def watched(fd: int, view: Any, offset: int) -> int:
            self.direct.append(is_direct(fd))
            most = self.act(is_direct(fd))
            return pwrite(fd, view[:most], offset)

        monkeypatch.setattr(os, "pwrite", watched)

    def fail(self, number: int) -> None:
        """Have direct writes fail."""

        def refuse(direct: bool) -> None:
            if direct:
                raise OSError(number, os.strerror(number))

        self.act = refuse


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> WriteCalls:
    return WriteCalls(monkeypatch)


@pytest.fixture(scope="module")
def memory() -> mmap.mmap:
    """Memory like that of a slab: whole pages of random bytes."""
    made = mmap.mmap(-1, 4 * MIB + 3 * ALIGNMENT)
    made[:] = os.urandom(len(made))
    return made


@pytest.fixture(autouse=True)
def on_a_disk(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
        (tmp_path / "probe").unlink()
    except OSError:
        pytest.skip(f"{tmp_path} is on a file system that refuses O_DIRECT")


def storage(root: Path, mode: DirectMode = "always") -> PosixStore:
    return PosixStore(root, DirectIo(mode))


def write(store: PosixStore, name: str, parts: dict[int, memoryview]) -> None:
    """Make a file of `parts`, by offset."""
    writer = store.writer(name, sum(map(len, parts.values())))
    for offset, part in parts.items():
        writer.write_at(offset, part)
    writer.finish()


def is_cached(path: Path) -> bool:
    """Return whether any page of the file is cached, without reading the file."""
    nbytes = path.stat().st_size
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), nbytes) as mapped:
        pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), pages
        )
        del first
        assert not failed
        return any(page & 1 for page in pages)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 8192, 3 * MIB + 5, 4 * MIB])
@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("header", [0, 4096, 4097])
def test_every_size_and_alignment_gives_the_same_bytes(
    tmp_path: Path, memory: mmap.mmap, nbytes: int, shift: int, header: int
) -> None:
    view = memoryview(memory)[shift : shift + nbytes]
    first = memoryview(bytes(range(256)) * 20)[:header]
    write(storage(tmp_path), "f", {0: first, header: view})
    assert (tmp_path / "f").read_bytes() == first.tobytes() + view.tobytes()


def test_whole_pages_bypass_the_cache_and_the_rest_goes_through_it(
    tmp_path: Path, memory: mmap.mmap, calls: WriteCalls
) -> None:
    view = memoryview(memory)
    write(storage(tmp_path), "f", {4096: view[: 3 * ALIGNMENT + 7], 0: memoryview(bytes(4096))})
    assert calls.direct == [True, False, False]
    calls.direct.clear()
    write(storage(tmp_path), "g", {0: view[1:4097], 4097: view[:4096]})
    assert calls.direct == [False, False]
    calls.direct.clear()
    write(storage(tmp_path, "never"), "h", {0: view[:8192]})
    assert calls.direct == [False]


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_write_of_no_bytes_is_an_error(
    tmp_path: Path, memory: mmap.mmap, calls: WriteCalls, mode: DirectMode
) -> None:
    """A FUSE server may answer so; before, the write was repeated for ever."""
    calls.act = lambda direct: 0 if len(calls.direct) < 100 else None
    with pytest.raises(StorageError, match="no byte was written"):
        write(storage(tmp_path, mode), "f", {0: memoryview(memory)[:8192]})
    assert len(calls.direct) == 1


@pytest.mark.parametrize("mode", ["always", "never", "auto"])
def test_no_page_of_a_written_file_stays_cached(
    tmp_path: Path, memory: mmap.mmap, mode: DirectMode
) -> None:
    (tmp_path / "read").write_bytes(memory)
    if not is_cached(tmp_path / "read"):
        pytest.skip("this file system does not tell what it has cached")
    view = memoryview(memory)
    write(storage(tmp_path, mode), "f", {0: view, len(view): view[: MIB + 1]})
    assert not is_cached(tmp_path / "f")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_if_o_direct_is_refused_files_are_written_through_the_cache(
    tmp_path: Path,
    memory: mmap.mmap,
    calls: WriteCalls,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    requested = []
    really = os.open

    def refuse(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if flags & os.O_DIRECT:
            requested.append(path)
            raise OSError(number, os.strerror(number))
        return really(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refuse)
    store = storage(tmp_path)
    for name in "ab":
        write(store, name, {0: memoryview(memory)})
        assert (tmp_path / name).read_bytes() == memory[:]
    assert calls.direct == [False, False]
    assert len(requested) == 1, "each file system is tried once"


def test_after_a_refused_direct_write_all_writes_go_through_the_cache(
    tmp_path: Path, memory: mmap.mmap, calls: WriteCalls
) -> None:
    calls.fail(errno.EINVAL)
    store = storage(tmp_path, "auto")
    for name in "ab":
        write(store, name, {0: memoryview(memory)[: 2 * MIB], 2 * MIB: memoryview(memory)[:MIB]})
        assert (tmp_path / name).read_bytes() == memory[: 2 * MIB] + memory[:MIB]
    assert calls.direct == [True, False, False, False, False]


@pytest.mark.parametrize("most", [512, 4096, 5000])
def test_a_short_write_continues_at_its_end(
    tmp_path: Path, memory: mmap.mmap, calls: WriteCalls, most: int
) -> None:
    calls.act = lambda direct: most // 512 * 512 if len(calls.direct) < 3 else None
    write(storage(tmp_path), "f", {0: memoryview(memory)})
    assert (tmp_path / "f").read_bytes() == memory[:]
    assert calls.direct == ([True, True, True] if most == 4096 else [True, False, False])


def test_a_disk_error_is_raised_and_not_retried_through_the_cache(
    tmp_path: Path, memory: mmap.mmap, calls: WriteCalls
) -> None:
    with nothing_left_open():
        writer = storage(tmp_path).writer("f", len(memory))
        calls.fail(errno.EIO)
        with pytest.raises(StorageError, match="check it before the next save"):
            writer.write_at(0, memoryview(memory))
        assert calls.direct == [True]
        writer.abandon()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("slow", "verdict"), [(True, False), (False, True)])
def test_the_first_chunks_decide_for_the_faster_way(
    tmp_path: Path, memory: mmap.mmap, calls: WriteCalls, slow: bool, verdict: bool
) -> None:
    def delay(direct: bool) -> None:
        if direct is slow:
            time.sleep(0.1)

    calls.act = delay
    store = storage(tmp_path, "auto")
    view = memoryview(memory)[:MIB]
    write(store, "first", {number * MIB: view for number in range(16)})
    assert calls.direct[:12] == [True, False] * 6, "both ways alternate"
    assert calls.direct[12:] == [verdict] * 4
    calls.direct.clear()
    write(store, "next", {0: view, MIB: view})
    assert calls.direct == [verdict, verdict]
    for name, count in (("first", 16), ("next", 2)):
        assert (tmp_path / name).read_bytes() == memory[:MIB] * count
    calls.direct.clear()
    view = view[: 8 * ALIGNMENT]  # too small to be compared
    write(storage(tmp_path, "auto"), "f", {i * len(view): view for i in range(20)})
    assert calls.direct == [True] * 20
