"""Errors that only directories have: permissions, read-only and full disks, entries in the way.

All tests use real file systems. Some mount a tmpfs, if the machine allows it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.errors import AlreadyExistsError, FlashCkptError, StorageError
from megatron_flashckpt.storage.direct_io import DirectIo
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.scatter_read import KeptFiles
from tests.support.processes import nothing_left_open, open_files

MIB = 1024 * 1024
NOBODY = 65534
Operation = Callable[[PosixStore, str], object]
OPERATIONS: dict[str, Operation] = {
    "put": lambda store, name: store.put(name, b"new"),
    "writer": lambda store, name: store.writer(name, 4),
    "delete": lambda store, name: store.delete([name]),
    "get": lambda store, name: store.get(name),
    "get_into": lambda store, name: store.get_into(name, 0, [memoryview(bytearray(8))]),
    "list": lambda store, name: store.list(name),
}


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that mounts small file systems, which are unmounted after the test."""
    mounted = []

    def mount(options: str, kind: str = "tmpfs") -> Path:
        path = tmp_path / f"tmpfs{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", kind, "-o", options, kind, str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("needs the mount program")
        if done.returncode:
            pytest.skip(f"needs the right to mount a {kind}: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Drop root's exemption from permission bits."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_relative_root_does_not_follow_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = PosixStore("ckpt")
    monkeypatch.chdir("/")
    store.put("a", b"1")
    assert (tmp_path / "ckpt/a").read_bytes() == b"1"
    assert store.place == str(tmp_path / "ckpt")


def test_put_writes_into_no_file_that_exists(store, tmp_path, monkeypatch):
    store.put("tracker", b"old")
    os.link(tmp_path / "tracker", tmp_path / "other_link")
    with open(tmp_path / "tracker", "rb") as reader:
        store.put("tracker", b"new")
        assert reader.read() == b"old"
    assert (tmp_path / "other_link").read_bytes() == b"old"
    assert (tmp_path / "tracker").read_bytes() == b"new"
    monkeypatch.setattr(
        "megatron_flashckpt.storage.posix_files.temporary_name", lambda name: "other_link"
    )
    with pytest.raises(StorageError, match="cannot write"):
        store.put("name", b"data")
    assert (tmp_path / "other_link").read_bytes() == b"old"


@pytest.mark.parametrize("verb", ["put", "writer", "get", "list"])
def test_the_error_names_a_file_in_the_place_of_a_directory(store, tmp_path, verb):
    (tmp_path / "file").write_bytes(b"stays")
    with pytest.raises(StorageError, match=f"{tmp_path}/file.* move it away") as caught:
        OPERATIONS[verb](store, "file" if verb == "list" else "file/x")
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert (tmp_path / "file").read_bytes() == b"stays"


@pytest.mark.parametrize("verb", ["put", "get", "get_into", "delete"])
def test_the_error_names_a_directory_in_the_place_of_a_file(store, tmp_path, verb):
    (tmp_path / "d").mkdir()
    with pytest.raises(OSError, match=f"{tmp_path}/d: .*a directory stands") as caught:
        OPERATIONS[verb](store, "d")
    assert caught.value.errno == errno.EISDIR
    assert isinstance(caught.value, FlashCkptError)
    assert os.listdir(tmp_path) == ["d"]


def test_an_object_that_nobody_may_write_counts_as_existing():
    """A person has run `chmod -R a-w` on checkpoints."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        root.chmod(0o777)
        (root / "shard").write_bytes(b"whole")
        (root / "shard").chmod(0o444)
        store = PosixStore(root)
        with unprivileged(), pytest.raises(AlreadyExistsError):
            store.writer("shard", 5)
        assert store.get("shard") == b"whole"


@pytest.mark.parametrize("verb", ["put", "writer", "delete", "get"])
def test_a_lack_of_permission_is_named_with_the_remedy(verb):
    # Not below tmp_path: the unprivileged user may not enter its parents.
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        (root / "f").write_bytes(b"old")
        root.chmod(0o555)
        (root / "f").chmod(0)
        try:
            with unprivileged(), pytest.raises(StorageError, match=f"{root}/") as caught:
                OPERATIONS[verb](PosixStore(root), "new" if verb == "writer" else "f")
        finally:
            root.chmod(0o755)
        assert caught.value.errno == errno.EACCES
        if verb != "get":
            assert "give this user write permission there" in str(caught.value)
        assert os.listdir(root) == ["f"]
        assert (root / "f").read_bytes() == b"old"


@pytest.mark.parametrize("verb", ["put", "writer"])
def test_a_read_only_file_system_is_named_with_the_remedy(tmpfs, verb):
    root = tmpfs("ro,size=1m")
    with pytest.raises(StorageError, match=f"{root}/.*is read-only: remount it") as caught:
        OPERATIONS[verb](PosixStore(root), "f")
    assert caught.value.errno == errno.EROFS
    assert os.listdir(root) == []


def test_a_full_disk_is_reported_before_the_first_byte_and_keeps_its_files(tmpfs):
    root = tmpfs("size=1m")
    store = PosixStore(root)
    store.put("tracker", b"old")

    def refused(message: str, call: Callable[[], object]) -> None:
        with pytest.raises(StorageError, match=f"{root}/{message}.*free space there") as caught:
            call()
        assert caught.value.errno == errno.ENOSPC
        assert store.get("tracker") == b"old"

    refused("tracker: ", lambda: store.put("tracker", bytes(2 * MIB)))
    refused("shard: cannot reserve its 2097152 bytes ", lambda: store.writer("shard", 2 * MIB))
    assert os.listdir(root) == ["tracker"]
    store.delete(["tracker"])
    writer = store.writer("shard", MIB)
    with pytest.raises(StorageError, match=f"{root}/shard: cannot write .*free space") as caught:
        writer.write_at(MIB, b"one too many")
    assert caught.value.errno == errno.ENOSPC
    writer.abandon()
    assert os.listdir(root) == []


def test_reserved_space_is_writable_and_is_freed_by_abandon(tmpfs):
    store = PosixStore(tmpfs("size=1m"))
    for _ in range(3):
        writer = store.writer("shard", MIB)
        with pytest.raises(StorageError, match="free space there"):
            store.writer("other", MIB // 2)
        writer.write_at(0, bytes(MIB))
        writer.abandon()
        assert store.list("") == []


def of_this_process(counter: str) -> int:
    """Return a counter of the kernel about the system calls of this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{counter}:")).split()[1])


def test_reserving_space_writes_nothing_where_it_is_unsupported(tmpfs):
    """On such a file system glibc's posix_fallocate writes one byte per page, 4,096 for 16 MiB."""
    store = PosixStore(tmpfs("size=32m", "ramfs"))
    before = of_this_process("syscw")
    writer = store.writer("shard", 16 * MIB)
    assert of_this_process("syscw") - before < 10
    writer.write_at(0, b"1")
    writer.finish()
    assert store.get("shard") == b"1"


@pytest.mark.parametrize("method", ["finish", "abandon"])
def test_an_error_of_close_leaves_no_descriptor_open(tmp_path, monkeypatch, method):
    writer = PosixStore(tmp_path, DirectIo("always")).writer("shard", MIB)
    ours = {writer._fd, writer._direct_fd} - {-1}
    assert len(ours) == 2, "direct writes have a second descriptor"
    opened = {os.readlink(f"/proc/self/fd/{fd}") for fd in ours}
    real_close = os.close

    def close(fd: int) -> None:
        real_close(fd)
        if fd in ours:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", close)
    if method == "finish":
        with pytest.raises(StorageError, match="raise the quota"):
            writer.finish()
    else:
        writer.abandon()
    monkeypatch.undo()
    assert opened.isdisjoint(open_files())


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.EIO])
def test_only_a_lack_of_fsync_for_directories_is_accepted(store, monkeypatch, number):
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EIO:
        with pytest.raises(StorageError, match="check it before the next save"):
            store.put("f", b"1")
        return
    store.put("f", b"1")
    writer = store.writer("shard", 1)
    writer.write_at(0, b"2")
    writer.finish()
    assert (store.get("f"), store.get("shard")) == (b"1", b"2")


def test_busy_storage_is_not_taken_for_the_end_of_a_file(store, monkeypatch):
    """If a read fails with EAGAIN, Python's file objects return None or the bytes so far."""
    store.put("file", b"12345678")

    def busy(*args: object) -> bytes:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "pread", busy)
    with pytest.raises(StorageError, match="busy"):
        store.get("file")


def test_files_kept_open_are_closed_with_their_holder(store, tmp_path):
    kept = KeptFiles()
    with nothing_left_open():
        for number in range(20):
            (tmp_path / f"{number}").write_bytes(b"data")
            store.get_into(f"{number}", 0, [memoryview(bytearray(1))], kept=kept)
            assert sum(name.startswith(f"{tmp_path}/") for name in open_files()) <= 4
        del kept


def test_a_read_of_a_few_bytes_fetches_only_these(store, tmp_path):
    """A buffered read would fetch st_blksize bytes: 1 MiB on NFS, 4 MiB on Lustre."""
    (tmp_path / "file").write_bytes(bytes(100_000))
    before = of_this_process("rchar")
    for _ in range(100):
        assert store.get("file", 10, 27) == bytes(27)
    assert of_this_process("rchar") - before < 100 * 4096
