"""Processes race to create names on storage that fails, loses answers and shows names late."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_flashckpt
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.faulty_storage.preload import FaultyStorage, fail, sometimes, sometimes_late

HOME = Path(megatron_flashckpt.__file__).parents[1]
NAMES = 60
PASSING = (errno.EIO, errno.ETIMEDOUT, errno.ESTALE)
PROGRAM = """
import sys
from megatron_flashckpt.errors import AlreadyExistsError
from megatron_flashckpt.storage import retrying_store
from megatron_flashckpt.storage.posix_store import PosixStore

retrying_store.time.sleep = lambda _: None
store = retrying_store.RetryingStore(PosixStore(sys.argv[1]))
data = sys.argv[2].encode() * 1000
for number in range(int(sys.argv[3])):
    try:
        store.create(f"d/{number}", data)
        print("won", number)
    except AlreadyExistsError:
        assert store.get(f"d/{number}") in (b"a" * 1000, b"b" * 1000, b"c" * 1000)
"""


@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no links"])
def test_exactly_one_process_creates_each_name(tmp_path: Path, has_links: bool) -> None:
    """A create whose answer was lost meets its own object, and must not be taken for beaten."""
    root, home, seed = tmp_path / "root", tmp_path / "home", 0
    home.mkdir()
    storage = FaultyStorage(root, home)
    calls = ("link", "rename", "fsync", "open", "write")
    storage.rule(
        *([] if has_links else [fail("link", errno.EOPNOTSUPP)]),
        *(sometimes(call, 100, seed, PASSING) for call in calls),
        sometimes("link", 2000, seed, PASSING, done=True),
        sometimes("rename", 500, seed, PASSING, done=True),
        sometimes_late(20, seed),
    )
    PosixStore(root).put("d/there", b"x")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(root), bidder, str(NAMES)],
            env={**os.environ, **storage.environment, "PYTHONPATH": str(HOME)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for bidder in "abc"
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, [
        errors[-3000:] for _, errors in results
    ]
    winners = {
        number: bidder
        for bidder, (output, _) in zip("abc", results, strict=True)
        for number in output.replace("won", "").split()
    }
    wins = [number for output, _ in results for number in output.replace("won", "").split()]
    assert sorted(map(int, wins)) == list(range(NAMES)), "each name has one winner"
    store = PosixStore(root)
    for number, bidder in winners.items():
        assert store.get(f"d/{number}") == bidder.encode() * 1000
    assert [hit for hit in storage.hits() if hit.call == ("link" if has_links else "rename")]
