"""Errors that only directories have: symbolic links, permissions, read-only and full disks.

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

from megatron_flashckpt.errors import FlashCkptError, StorageError
from megatron_flashckpt.storage.direct_io import DirectIo
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.scatter_read import KeptFiles
from tests.support.processes import nothing_left_open, open_files

MIB = 1024 * 1024
NOBODY = 65534


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def store(root: Path) -> PosixStore:
    return PosixStore(root)


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


def test_put_never_writes_into_the_existing_file(store, root):
    store.put("tracker", b"old")
    os.link(root / "tracker", root / "other_link")
    with open(root / "tracker", "rb") as reader:
        store.put("tracker", b"new")
        assert reader.read() == b"old"
    assert (root / "other_link").read_bytes() == b"old"
    assert (root / "tracker").read_bytes() == b"new"


def test_a_put_does_not_remove_a_file_with_its_temporary_name(store, root, monkeypatch):
    root.mkdir(exist_ok=True)
    (root / "taken").write_text("not ours")
    monkeypatch.setattr(
        "megatron_flashckpt.storage.posix_files.temporary_name", lambda name: "taken"
    )
    with pytest.raises(StorageError, match="cannot write"):
        store.put("name", b"data")
    assert (root / "taken").read_text() == "not ours"


def test_a_put_over_a_directory_fails_and_leaves_no_temporary(store, root):
    (root / "d").mkdir()
    with pytest.raises(StorageError, match="a directory stands where a file should be") as caught:
        store.put("d", b"")
    assert caught.value.errno == errno.EISDIR
    assert os.listdir(root) == ["d"]


@pytest.mark.parametrize(
    "operation",
    [
        lambda store: store.put("file/x", b""),
        lambda store: store.writer("file/x", 1),
        lambda store: store.get("file/x"),
        lambda store: store.list("file"),
    ],
    ids=["put", "writer", "get", "list"],
)
def test_the_error_names_a_file_in_the_place_of_a_directory(store, root, operation):
    (root / "file").write_bytes(b"stays")
    with pytest.raises(StorageError) as caught:
        operation(store)
    assert str(root / "file") in str(caught.value)
    assert "move it away" in str(caught.value)
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert (root / "file").read_bytes() == b"stays"


def get_into(store, name):
    return store.get_into(name, 0, [memoryview(bytearray(8))])


def delete(store, name):
    store.delete([name])


@pytest.mark.parametrize(
    "operation", [PosixStore.get, get_into, delete], ids=lambda it: it.__name__
)
def test_the_error_names_a_directory_in_the_place_of_a_file(store, root, operation):
    (root / "d").mkdir()
    with pytest.raises(StorageError, match=f"{root}/d: .*a directory stands") as caught:
        operation(store, "d")
    assert caught.value.errno == errno.EISDIR
    assert (root / "d").is_dir()


@pytest.mark.parametrize(
    "operation",
    [
        lambda store: store.put("f", b"new"),
        lambda store: store.writer("new", 4),
        lambda store: store.delete(["f"]),
    ],
    ids=["put", "writer", "delete"],
)
def test_a_directory_without_write_permission_is_named_with_the_remedy(operation):
    # Not below tmp_path: the unprivileged user may not enter its parents.
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        (root / "f").write_bytes(b"old")
        (root / "d").mkdir()
        root.chmod(0o555)
        try:
            with unprivileged(), pytest.raises(StorageError) as caught:
                operation(PosixStore(root))
        finally:
            root.chmod(0o755)
        assert caught.value.errno == errno.EACCES
        assert f"{root}/" in str(caught.value)
        assert "give this user write permission there" in str(caught.value)
        assert sorted(os.listdir(root)) == ["d", "f"]
        assert (root / "f").read_bytes() == b"old"


def test_a_file_without_read_permission_is_named_with_the_remedy():
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        root.chmod(0o755)
        (root / "f").write_bytes(b"secret")
        (root / "f").chmod(0)
        with unprivileged(), pytest.raises(StorageError, match=f"{root}/f: cannot read") as caught:
            PosixStore(root).get("f")
        assert caught.value.errno == errno.EACCES


@pytest.mark.parametrize(
    "operation",
    [lambda store: store.put("f", b"new"), lambda store: store.writer("new", 4)],
    ids=["put", "writer"],
)
def test_a_read_only_file_system_is_named_with_the_remedy(tmpfs, operation):
    root = tmpfs("ro,size=1m")
    with pytest.raises(StorageError, match=f"{root}/") as caught:
        operation(PosixStore(root))
    assert caught.value.errno == errno.EROFS
    assert "the file system is read-only: remount it" in str(caught.value)
    assert os.listdir(root) == []


def test_a_full_disk_is_reported_before_the_first_byte(tmpfs):
    root = tmpfs("size=1m")
    with pytest.raises(
        StorageError, match=f"{root}/shard: cannot reserve its 2097152 bytes "
    ) as caught:
        PosixStore(root).writer("shard", 2 * MIB)
    assert caught.value.errno == errno.ENOSPC
    assert "free space there or save elsewhere" in str(caught.value)
    assert os.listdir(root) == []


def writes() -> int:
    """Return the number of writing system calls of this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("syscw:")).split()[1])


def test_reserving_space_writes_nothing_where_it_is_unsupported(tmpfs):
    """On such a file system glibc's posix_fallocate writes one byte per page, 4,096 for 16 MiB."""
    store = PosixStore(tmpfs("size=32m", "ramfs"))
    before = writes()
    writer = store.writer("shard", 16 * MIB)
    assert writes() - before < 10
    writer.write_at(0, b"1")
    writer.finish()
    assert store.get("shard") == b"1"


@pytest.mark.parametrize("method", ["finish", "abandon"])
def test_an_error_of_close_leaves_no_descriptor_open(root, monkeypatch, method):
    writer = PosixStore(root, DirectIo("always")).writer("shard", MIB)
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


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP])
def test_a_file_system_without_fsync_of_directories_is_accepted(root, monkeypatch, number):
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store = PosixStore(root)
    store.put("f", b"1")
    writer = store.writer("shard", 1)
    writer.write_at(0, b"2")
    writer.finish()
    assert (store.get("f"), store.get("shard")) == (b"1", b"2")


def test_an_io_error_of_a_directory_s_fsync_is_raised(root, monkeypatch):
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="check it before the next save"):
        PosixStore(root).put("f", b"1")


def test_reserved_space_is_writable_and_is_freed_by_abandon(tmpfs):
    store = PosixStore(tmpfs("size=1m"))
    for _ in range(3):
        writer = store.writer("shard", MIB)
        with pytest.raises(StorageError, match="free space there"):
            store.writer("other", MIB // 2)
        writer.write_at(0, bytes(MIB))
        writer.abandon()
        assert store.list("") == []


def test_a_write_beyond_the_reserved_space_reports_a_full_disk(tmpfs):
    root = tmpfs("size=1m")
    writer = PosixStore(root).writer("shard", MIB)
    with pytest.raises(StorageError, match=f"{root}/shard: cannot write .*free space") as caught:
        writer.write_at(MIB, b"one too many")
    assert caught.value.errno == errno.ENOSPC
    writer.abandon()
    assert os.listdir(root) == []


def test_a_put_on_a_full_disk_keeps_the_old_contents(tmpfs):
    root = tmpfs("size=1m")
    store = PosixStore(root)
    store.put("tracker", b"old")
    with pytest.raises(StorageError, match=f"{root}/tracker: .*free space there") as caught:
        store.put("tracker", bytes(2 * MIB))
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(root) == ["tracker"]
    assert store.get("tracker") == b"old"


def test_a_storage_error_is_also_an_os_error(store, root):
    (root / "d").mkdir()
    with pytest.raises(OSError, match="Is a directory") as caught:
        store.get("d")
    assert isinstance(caught.value, FlashCkptError)
    assert isinstance(caught.value.__cause__, IsADirectoryError)


def test_busy_storage_is_not_taken_for_the_end_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a read fails with EAGAIN, Python's file objects return None or the bytes so far."""
    store = PosixStore(tmp_path)
    store.put("file", b"12345678")

    def busy(*args: object) -> bytes:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "pread", busy)
    with pytest.raises(StorageError, match="busy"):
        store.get("file")
    monkeypatch.undo()
    assert store.get("file") == b"12345678"


def test_files_kept_open_are_closed_with_their_holder(tmp_path):
    store, kept = PosixStore(tmp_path), KeptFiles()
    with nothing_left_open():
        for number in range(20):
            (tmp_path / f"{number}").write_bytes(b"data")
            store.get_into(f"{number}", 0, [memoryview(bytearray(1))], kept=kept)
            assert sum(name.startswith(f"{tmp_path}/") for name in open_files()) <= 4
        del kept


def test_a_read_of_a_few_bytes_fetches_only_these(tmp_path: Path) -> None:
    """A buffered read would fetch st_blksize bytes: 1 MiB on NFS, 4 MiB on Lustre."""
    (tmp_path / "file").write_bytes(bytes(100_000))
    before = _read_nbytes()
    for _ in range(100):
        assert PosixStore(tmp_path).get("file", 10, 27) == bytes(27)
    assert _read_nbytes() - before < 100 * 4096


def _read_nbytes() -> int:
    """Return the bytes that this process has read by system calls."""
    (line,) = (it for it in Path("/proc/self/io").read_text().splitlines() if "rchar" in it)
    return int(line.split()[1])
