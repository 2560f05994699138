"""Loss of power: a checkpoint that the tracker names keeps all of its data.

No power is cut here. The tests record the calls that make data durable, and check that record at
the critical moments. (A killed process loses no written data: see `tools/crash`.)
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron_flashckpt.agent.commit import commit, outcome_of

from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.test_shard_writer import stored
from tests.support.persisting import persisted

SAVE = "a" * 12
DIRECTORY = file_names.iteration_dir(5)


class Disk:
    """Data that survives a loss of power: contents by inode, and names with their inodes."""

    def __init__(self) -> None:
        self.contents: set[int] = set()
        self.names: set[tuple[str, int]] = set()
        self.syncs = 0

    def note(self, fd: int) -> None:
        self.syncs += 1
        where = os.readlink(f"/proc/self/fd/{fd}")
        if os.path.isdir(where):
            self.names |= {(entry.path, entry.inode()) for entry in os.scandir(where)}
        else:
            self.contents.add(os.fstat(fd).st_ino)

    def keeps(self, path: Path) -> bool:
        inode = path.stat().st_ino
        return inode in self.contents and (str(path), inode) in self.names


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    noted = Disk()

    def noting(call: Callable[[int], None]) -> Callable[[int], None]:
        def wrapper(fd: int) -> None:
            call(fd)
            noted.note(fd)

        return wrapper

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    return noted


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], None]]:
    """Callbacks by file name; each runs right before a file is renamed to that name."""
    calls: dict[str, Callable[[], None]] = {}
    replace = os.replace

    def wrapper(source: Path, target: Path) -> None:
        calls.pop(target.name, lambda: None)()
        replace(source, target)

    monkeypatch.setattr(os, "replace", wrapper)
    return calls


def test_a_checkpoint_is_durable_before_the_tracker_names_it(
    root: Path, disk: Disk, renamed: dict[str, Callable[[], None]]
) -> None:
    record = file_names.record_name(0, SAVE)
    needed = [file_names.shard_name(0, SAVE), file_names.common_name(SAVE), file_names.MANIFEST]

    def shard_is_durable() -> None:
        assert disk.keeps(root / DIRECTORY / needed[0])

    def all_is_durable() -> None:
        assert [name for name in needed if not disk.keeps(root / DIRECTORY / name)] == []

    renamed |= {record: shard_is_durable, file_names.TRACKER: all_is_durable}
    commit(persisted(PosixStorage(root), SAVE))
    assert renamed == {}, "both callbacks have run"
    assert disk.keeps(root / file_names.TRACKER)
    print(f"{disk.syncs} syncs of a save of one rank")


def test_a_manifest_gets_its_name_after_its_files_are_fsynced(
    root: Path, disk: Disk, renamed: dict[str, Callable[[], None]]
) -> None:
    def look() -> None:
        for name in (file_names.shard_name(0, SAVE), file_names.common_name(SAVE)):
            assert (root / DIRECTORY / name).stat().st_ino in disk.contents

    renamed[file_names.MANIFEST] = look
    commit(persisted(PosixStorage(root), SAVE))
    assert renamed == {}


@pytest.mark.parametrize("cause", ["the agent was killed", "the directory was not fsynced"])
def test_a_manifest_is_durable_before_another_attempt_moves_the_tracker(
    root: Path,
    disk: Disk,
    renamed: dict[str, Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    cause: str,
) -> None:
    save = persisted(PosixStorage(root), SAVE)
    manifest = root / DIRECTORY / file_names.MANIFEST
    fsync = os.fsync

    def fail_once(fd: int) -> None:
        if manifest.exists():
            monkeypatch.setattr(os, "fsync", fsync)
            raise KeyboardInterrupt if "killed" in cause else OSError(errno.EIO, "fails")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail_once)
    with contextlib.suppress(KeyboardInterrupt):
        assert outcome_of(save, 60.0) == (False, None)
    assert not disk.keeps(manifest)

    def manifest_is_durable() -> None:
        assert disk.keeps(manifest)

    renamed[file_names.TRACKER] = manifest_is_durable
    assert outcome_of(save, 60.0) == (True, None)
    assert renamed == {}
    assert verify(stored(root, 5)) == []


@pytest.mark.parametrize(
    ("durable", "contents", "name"),
    [("name", True, True), ("contents", True, False), ("nothing", False, False)],
)
def test_put_makes_contents_and_name_durable_as_requested(
    root: Path, disk: Disk, durable: str, contents: bool, name: bool
) -> None:
    root.mkdir()
    PosixStorage(root).put("a/b", b"held", durable)
    path = root / "a/b"
    assert path.read_bytes() == b"held"
    assert (path.stat().st_ino in disk.contents) is contents
    assert ((str(path), path.stat().st_ino) in disk.names) is name


def test_a_directory_fsync_makes_all_earlier_names_durable(root: Path, disk: Disk) -> None:
    storage = PosixStorage(root)
    storage.put("a/first", b"1", "contents")
    assert not disk.keeps(root / "a/first")
    storage.put("a/second", b"2")
    assert disk.keeps(root / "a/first")
    assert disk.keeps(root / "a/second")
