"""Loss of power: a checkpoint that the tracker names keeps all of its data.

No power is cut here. The tests record the calls that make data durable, and check that record at
the critical moments. (A killed process loses no written data: see `tools/crash`.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flashckpt.file_format import file_names
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.trainer import new_save_id

SAVE = new_save_id()
DIRECTORY = file_names.iteration_dir(5)


class Disk:
    """Data that survives a loss of power: contents by inode, and names with their inodes.

    Runs a check right before a file gets its name; each runs once.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: dict[str, Callable[[], list[str]]] = {}
        self.problems: list[str] = []
        self._contents: set[int] = set()
        self._names: set[tuple[str, int]] = set()
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))
        for name in ("link", "replace"):
            monkeypatch.setattr(os, name, self._checking(getattr(os, name)))

    def _noting(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def wrapper(fd: int) -> None:
            call(fd)
            where = os.readlink(f"/proc/self/fd/{fd}")
            if os.path.isdir(where):
                self._names |= {(entry.path, entry.inode()) for entry in os.scandir(where)}
            else:
                self._contents.add(os.fstat(fd).st_ino)

        return wrapper

    def _checking(self, call: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def wrapper(source: Path, target: Path) -> None:
            self.problems += self.before.pop(os.path.basename(target), list)()
            call(source, target)

        return wrapper

    def keeps(self, path: Path) -> bool:
        inode = path.stat().st_ino
        return inode in self._contents and (str(path), inode) in self._names


def test_a_checkpoint_is_durable_before_the_tracker_names_it(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    shard, end = file_names.shard_name(0, SAVE), file_names.end_name(SAVE)
    common = file_names.common_name(SAVE)

    def lost(*names: str) -> list[str]:
        return [name for name in names if not disk.keeps(root / DIRECTORY / name)]

    disk.before |= {
        file_names.record_name(range(1), SAVE): lambda: lost(shard),
        end: lambda: lost(shard, common),
        file_names.TRACKER: lambda: lost(shard, common, end),
        os.path.basename(file_names.TRACKED): lambda: (
            [] if disk.keeps(root / file_names.TRACKER) else ["the tracker"]
        ),
    }
    with agent_here(node, root):
        assert node.trainer(root).save(5, SAVE).error is None
    assert disk.before == {}, "all checks have run"
    assert disk.problems == []
    assert disk.keeps(root / file_names.TRACKER)
