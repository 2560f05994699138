"""A load whose file system shows the tracker late resumes from memory."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.agent.protocol import Offer
from megatron_flashckpt.file_format.file_names import MANIFEST, TRACKER, iteration_dir
from megatron_flashckpt.load import late_tracker, resume
from megatron_flashckpt.load.late_tracker import await_tracker
from megatron_flashckpt.load.memory_checkpoints import MemoryCheckpoint
from megatron_flashckpt.load.named_checkpoint import NamedCheckpoint, named_in
from megatron_flashckpt.storage.posix import PosixStorage
from tests.faulty_storage.preload import FaultyStorage, late

#: Longest wait of the tests that are not to wait to the end.
PATIENCE_S = 60.0
#: Program that writes the tracker, on faulty storage.
WRITE = """
import sys
from megatron_flashckpt.file_format.file_names import TRACKER
from megatron_flashckpt.storage.posix import PosixStorage

PosixStorage(sys.argv[1]).put(TRACKER, b"6")
"""
#: Program that finds the tracker with memory of iteration 6, and prints what it names.
FIND = """
import sys
from megatron_flashckpt.load.named_checkpoint import named_in
from megatron_flashckpt.load.late_tracker import await_tracker
from megatron_flashckpt.storage.posix import PosixStorage
from tests.load.test_late_tracker import memory

storage = PosixStorage(sys.argv[1])
print(named_in(storage, None).iteration, flush=True)
print(await_tracker(lambda: named_in(storage, None), storage, memory(), 60.0).iteration)
"""


def memory(committed: int = 6) -> list[MemoryCheckpoint]:
    slab: Any = None
    return [MemoryCheckpoint(slab, Offer(0, 6, "a" * 12, False, None), committed)]


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    """Storage with manifests of iterations 4 and 6, of which the older tracker names 4."""
    root = tmp_path / "save"
    for iteration in (4, 6):
        (root / iteration_dir(iteration)).mkdir(parents=True)
        (root / iteration_dir(iteration) / MANIFEST).touch()
    (root / TRACKER).write_text("4")
    manifest = (root / iteration_dir(6) / MANIFEST).stat()
    os.utime(root / TRACKER, ns=(manifest.st_atime_ns, manifest.st_mtime_ns - 1_000_000_000))
    return PosixStorage(root)


class Finder:
    """Names each of `iterations` in turn, and the last one from then on."""

    def __init__(self, *iterations: int | None) -> None:
        self.iterations, self.calls = list(iterations), 0

    def __call__(self) -> NamedCheckpoint:
        self.calls += 1
        return NamedCheckpoint(self.iterations[min(self.calls, len(self.iterations)) - 1])


@pytest.mark.parametrize("shown_first", [4, None], ids=["old content", "no file"])
def test_a_tracker_that_is_shown_late_is_awaited(
    storage: PosixStorage, shown_first: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    find = Finder(shown_first, shown_first, 6)
    assert await_tracker(find, storage, memory(), PATIENCE_S).iteration == 6
    assert find.calls == 3
    assert "although iteration 6 was committed; waiting at most 60 s" in caplog.text
    assert "are not used" not in caplog.text


def test_a_tracker_that_was_set_back_is_followed_at_once(
    storage: PosixStorage, caplog: pytest.LogCaptureFixture
) -> None:
    os.utime(Path(storage.place) / TRACKER)
    find = Finder(4)
    assert await_tracker(find, storage, memory(), PATIENCE_S).iteration == 4
    assert find.calls == 2
    assert "waiting" not in caplog.text
    assert "names 4, although iteration 6 was committed: it was set back or removed" in caplog.text


def test_a_tracker_that_comes_into_view_after_the_first_look_is_not_set_back(
    storage: PosixStorage, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Path(storage.place) / TRACKER
    shown = named_in(storage, None)

    def find() -> NamedCheckpoint:
        nonlocal shown
        before, shown = shown, NamedCheckpoint(6)
        tracker.write_text("6")
        return before

    assert await_tracker(find, storage, memory(), PATIENCE_S).iteration == 6
    assert caplog.text == ""


def test_after_the_wait_the_tracker_is_believed(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(late_tracker, "_POLL_S", 0.01)
    find = Finder(None)
    assert await_tracker(find, storage, memory(), 0.05).iteration is None
    assert find.calls > 1
    assert "names no iteration, although iteration 6 was committed: it was set" in caplog.text


@pytest.mark.parametrize(("minutes", "wait_s"), [(None, 60.0), (10, 60.0), (1, 30.0)])
def test_the_wait_ends_before_the_other_ranks_time_out(minutes: int | None, wait_s: float) -> None:
    margs = argparse.Namespace(distributed_timeout_minutes=minutes)
    assert resume._tracker_wait_s(margs) == wait_s


def test_a_tracker_that_agrees_with_memory_is_read_once(
    storage: PosixStorage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for iteration, committed in ((6, 6), (8, 6), (4, 4), (None, -1)):
        find = Finder(iteration)
        assert await_tracker(find, storage, memory(committed), PATIENCE_S).iteration == iteration
        assert find.calls == 1
    assert caplog.text == ""


def test_a_load_on_another_node_sees_a_late_tracker(tmp_path: Path, storage: PosixStorage) -> None:
    """Before, the job started from scratch, although all ranks held iteration 6 in memory."""
    (Path(storage.place) / TRACKER).unlink()
    faulty = FaultyStorage(Path(storage.place), tmp_path)
    faulty.rule(late(3_600_000, TRACKER))

    def start(program: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program, storage.place],
            env={**faulty.environment, "PYTHONPATH": ":".join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            text=True,
        )

    try:
        assert start(WRITE).wait(PATIENCE_S) == 0
        with start(FIND) as finding:
            assert finding.stdout is not None
            assert finding.stdout.readline() == "None\n"
            faulty.heal()
            assert finding.stdout.readline() == "6\n"
    finally:
        faulty.heal()
