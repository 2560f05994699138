"""What only directories have: links, fsync, killed processes, mounts that go away."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import megatron_flashckpt
from megatron_flashckpt.errors import AlreadyExistsError, StorageError
from megatron_flashckpt.storage import posix_store
from megatron_flashckpt.storage.posix_files import PART, temporary_name
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Entry
from tests.support.processes import nothing_left_open

HOME = Path(megatron_flashckpt.__file__).parents[1]
NO_LINKS = """
import errno, os
def refuse(*args, **named):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
os.link = refuse
"""


def refuse_links(*args: object, **named: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(params=["links", "no links"])
def has_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "no links":
        monkeypatch.setattr(os, "link", refuse_links)
    return bool(request.param == "links")


@pytest.fixture
def store(root: Path) -> PosixStore:
    return PosixStore(root)


# ---------------------------------------------------------------------- create


def test_a_created_object_and_its_name_are_durable_when_create_returns(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        fsync(fd)
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), (root / "d/end").exists()))

    monkeypatch.setattr(os, "fsync", record)
    store.create("d/end", b"manifest")
    data_synced_before_named = [
        path for path, named in synced if not named and Path(path).suffix == ".tmp"
    ]
    assert data_synced_before_named, synced
    assert (str(root / "d"), True) in synced, "the name of the object"
    assert (str(root), True) in synced, "the name of its new directory"
    synced.clear()
    store.make_durable("d/end")
    assert synced == [(str(root / "d"), True), (str(root), True)]


@pytest.mark.parametrize("point", ["put.written", "put.renamed"])
def test_a_killed_create_leaves_no_partial_object(
    store: PosixStore, root: Path, has_links: bool, point: str
) -> None:
    program = f"""{"" if has_links else NO_LINKS}
from megatron_flashckpt.failpoints import set_process_name
from megatron_flashckpt.storage.posix_store import PosixStore
set_process_name("agent")
PosixStore({str(root)!r}).create("d/end", b"first")
"""
    # Without links the first temporary file is that of the link which is refused.
    count = 2 if point == "put.written" and not has_links else 1
    fault = f"agent:{point}:{count}"
    environment = {**os.environ, "FLASHCKPT_FAULT": fault, "PYTHONPATH": str(HOME)}
    killed = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    exists = point == "put.renamed"
    assert store.list("d") == ([Entry("end", 5, "file")] if exists else [])
    if exists or not has_links:  # without links the name is decided before it is there
        with pytest.raises(AlreadyExistsError):
            store.create("d/end", b"second")
        assert store.get("d/end") == b"first"
    else:
        store.create("d/end", b"second")
        assert store.get("d/end") == b"second"
    store.delete(["d/end"])
    assert os.listdir(root) == [], "what the killed process left is removed with the directory"


def test_a_decision_without_an_object_is_carried_out_by_the_next_create(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies after its rename has decided, though nobody could read it yet."""
    monkeypatch.setattr(os, "link", refuse_links)

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(posix_store, "replace_file", die)
        with pytest.raises(KeyboardInterrupt):
            store.create("d/end", b"first")
    store.create("d/other", b"x")
    store.delete(["d/other"])  # must not take the decision away
    assert store.stat("d/end") is None
    with pytest.raises(AlreadyExistsError):
        PosixStore(root).create("d/end", b"second")
    assert store.get("d/end") == b"first"


def test_links_are_tried_once_and_only_a_refusal_is_taken_for_their_absence(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def link(source: object, target: object) -> None:
        tried.append(target)
        number = errno.EIO if len(tried) == 1 else errno.EOPNOTSUPP
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError) as caught:
        store.create("a", b"1")
    assert caught.value.errno == errno.EIO
    store.create("a", b"1")
    store.create("b", b"2")
    assert len(tried) == 2
    assert [entry.name for entry in store.list("")] == ["a", "b"]


# ---------------------------------------------------------------------- links and other entries


WRITES: dict[str, Callable[[PosixStore], object]] = {
    "put": lambda store: store.put("d/x", b"y"),
    "create": lambda store: store.create("d/new", b"y"),
    "writer": lambda store: store.writer("d/shard", 1).finish(),
    "delete": lambda store: store.delete(["d/x"]),
    "delete below": lambda store: store.delete(["d/below/x"]),
}


@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_changed_through_a_link(store: PosixStore, root: Path, write: str) -> None:
    (root / "iter_1/below").mkdir(parents=True)
    for name in ("iter_1/x", "iter_1/below/x"):
        (root / name).write_bytes(b"stays")
    (root / "d").symlink_to("iter_1")
    with pytest.raises(StorageError, match="d: is a symbolic link") as caught:
        WRITES[write](store)
    assert caught.value.errno == errno.ELOOP
    assert store.get("d/x") == b"stays", "reads follow a branched directory"
    assert [entry.name for entry in store.list("d")] == ["below", "x"]


def test_links_pipes_and_temporary_names_are_told_apart(store: PosixStore, root: Path) -> None:
    root.mkdir()
    (root / "dir").symlink_to(root)
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    (root / ".end.0123abcd.tmp").write_bytes(b"half")
    kinds = {"dangling": "link", "dir": "link", "pipe": "other"}
    for sizes in (False, True):
        assert {entry.name: entry.kind for entry in store.list("", sizes=sizes)} == kinds
    for name, kind in kinds.items():
        assert store.stat(name) == Entry(name, 0, kind)
        with pytest.raises(StorageError):
            store.get(name)
    store.delete(["dir", "dangling"])
    assert [entry.name for entry in store.list("")] == ["pipe"]


def test_a_link_with_the_name_is_replaced_or_kept_and_never_followed(
    store: PosixStore, root: Path, tmp_path: Path
) -> None:
    root.mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(b"not ours")
    for name in ("put", "create", "writer"):
        (root / name).symlink_to(outside)
    store.put("put", b"ours")
    with pytest.raises(AlreadyExistsError):
        store.create("create", b"ours")
    with pytest.raises(AlreadyExistsError):
        store.writer("writer", 4)
    assert outside.read_bytes() == b"not ours"
    assert store.get("put") == b"ours"


def test_no_failed_operation_leaves_a_descriptor_open(
    store: PosixStore, root: Path, has_links: bool
) -> None:
    (root / "d/sub").mkdir(parents=True)
    store.create("d/end", b"x")
    (root / "link").symlink_to("d")
    operations: list[Callable[[], object]] = [
        lambda: store.create("d/end", b"y"),
        lambda: store.get("d/sub"),
        lambda: store.get("link"),
        lambda: store.get("absent"),
        lambda: store.put("d/sub", b"x"),
        lambda: store.writer("d/sub", 1),
        lambda: store.delete(["d/sub"]),
        lambda: store.stat("d/end/below"),
        lambda: store.list("d/end"),
    ]
    with nothing_left_open():
        for operation in operations:
            with pytest.raises((StorageError, FileNotFoundError)):
                operation()
    assert [entry.name for entry in store.list("d")] == ["end", "sub"]


# ---------------------------------------------------------------------- the root


@pytest.mark.parametrize("write", WRITES)
def test_only_the_first_write_makes_the_root(store: PosixStore, root: Path, write: str) -> None:
    assert store.list("") == []
    assert not root.exists()
    for name in ("d/x", "d/below/x"):
        store.create(name, b"x")
    away = root.rename(root.with_name("away"))
    for is_mount_point in (False, True):
        if is_mount_point:
            root.mkdir()
        with pytest.raises(StorageError, match="is away") as caught:
            WRITES[write](store)
        assert caught.value.errno == errno.ENOTCONN
    assert os.listdir(root) == []
    root.rmdir()
    away.rename(root)
    WRITES[write](store)


def test_a_directory_that_is_mounted_again_is_the_same(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("d/end", b"x")
    look = os.stat

    def stat(*args: object, **named: object) -> os.stat_result:
        found = list(look(*args, **named))  # type: ignore[arg-type]
        found[2] += 1  # st_dev
        return os.stat_result(found)

    monkeypatch.setattr(os, "stat", stat)
    store.create("d/other", b"x")


def test_what_killed_processes_left_unfinished_goes_by_its_final_name(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.create("a/whole", b"1")
    for name in ("dead", "alive"):
        for suffix in (".tmp", PART):
            (tmp_path / "a" / temporary_name(name, suffix)).write_bytes(b"half")
    store.discard_unfinished("a", lambda name: name == "dead")
    left = sorted(path.name.split(".")[1] for path in (tmp_path / "a").glob(".*"))
    assert left == ["alive", "alive"]
    assert store.get("a/whole") == b"1"
    store.discard_unfinished("missing", lambda name: True)


@pytest.mark.parametrize("write", [PosixStore.put, PosixStore.create])
def test_a_write_whose_unfinished_file_is_removed_begins_again(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_links: bool,
    write: Callable[[PosixStore, str, bytes], None],
) -> None:
    removed: list[int] = []
    fsync = os.fsync

    def remove_once(fd: int) -> None:
        fsync(fd)
        if not removed and ".tmp" in os.readlink(f"/proc/self/fd/{fd}"):
            removed.append(fd)
            PosixStore(root).discard_unfinished("d", lambda name: True)

    monkeypatch.setattr(os, "fsync", remove_once)
    write(PosixStore(root), "d/end", b"whole")
    assert removed
    assert PosixStore(root).get("d/end") == b"whole"
