"""A save directory with other users: members of a group, and copies taken during saves."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flashckpt.catalog import listing
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.agent.test_shard_writer import read_rank, stored
from tests.support.trainer import content, eventually

GROUP = 12345


@pytest.mark.skipif(os.getuid() != 0, reason="only root can choose any group")
def test_members_of_a_group_may_read_and_replace_files_in_their_directory(
    node: Node, root: Path
) -> None:
    root.mkdir()
    try:
        os.chown(root, -1, GROUP)
    except OSError as error:
        pytest.skip(f"this machine refuses groups: {error}")
    root.chmod(0o2775)
    former = os.umask(0o002)
    try:
        trainer = node.trainer(root)  # the agent inherits this umask
        trainer.open_run()
    finally:
        os.umask(former)
    assert trainer.save(1).error is None
    eventually("the history", (root / file_names.HISTORY).exists)
    eventually("the removal of commit records", lambda: not list(root.rglob("*.record")))
    for path in root.rglob("*"):
        status = path.stat()
        assert status.st_gid == GROUP, path
        expected = 0o2775 if path.is_dir() else 0o664
        assert stat.S_IMODE(status.st_mode) == expected, path


def _tar(source: Path, copy: Path) -> None:
    copy.mkdir()
    command = f"tar -C '{source}' -cf - . | tar -C '{copy}' -xf -"
    subprocess.run(["sh", "-c", command], stderr=subprocess.DEVNULL, check=False)


def _file_by_file(source: Path, copy: Path) -> None:
    """Copy as `rsync` and `cp` do: files that disappear meanwhile are left out."""
    with contextlib.suppress(shutil.Error):
        shutil.copytree(source, copy)


@pytest.mark.parametrize("take", [_tar, _file_by_file])
def test_a_copy_taken_during_saves_contains_no_partial_checkpoint(
    node: Node, root: Path, tmp_path: Path, take: Callable[[Path, Path], None]
) -> None:
    trainer = node.trainer(root, numel=2**18)
    assert trainer.save(1).error is None
    stop = threading.Event()

    def train() -> None:
        iteration = 1
        while not stop.is_set():
            iteration += 1
            assert trainer.save(iteration).error is None

    training = threading.Thread(target=train)
    training.start()
    try:
        eventually(
            "the commit of iteration 3",
            lambda: list((root / file_names.iteration_dir(3)).glob("*.end")),
        )
        take(root, tmp_path / "copy")
    finally:
        stop.set()
        training.join()
    iterations = listing.committed_iterations(PosixStore(tmp_path / "copy"))
    assert iterations[:2] == [1, 2]
    for iteration in iterations:
        checkpoint = stored(tmp_path / "copy", iteration)
        assert verify(checkpoint) == []
        expected = content(0, iteration, trainer.layout.nbytes)
        assert read_rank(checkpoint, trainer) == expected
