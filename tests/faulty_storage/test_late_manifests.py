"""Resumes of a job on a node that does not see yet what another node has written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.file_format import file_names
from tests.agent.test_cleanup import listing
from tests.agent.test_shard_writer import stored
from tests.faulty_storage.preload import FaultyStorage, late

SAVE = "a" * 12
#: Program that commits a checkpoint and ends before it removes the records.
COMMIT = f"""
import sys
from megatron_flashckpt.agent.commit import commit
from megatron_flashckpt.storage.posix import PosixStorage
from tests.support.persisting import persisted

commit(persisted(PosixStorage(sys.argv[1]), {SAVE!r}))
"""
#: Program that resumes from the given iteration, and removes files after the second look.
RESUME = """
import sys
import time
from megatron_flashckpt.agent import cleanup
from megatron_flashckpt.storage.posix import PosixStorage

sweeper = cleanup.Sweeper(PosixStorage(sys.argv[1]))
for line in sys.stdin:
    if line.startswith("resume"):
        words = line.split()
        sweeper.find_orphans_soon(lambda iteration: False, int(words[1]) if words[1:] else None)
    else:
        time.monotonic = lambda: sys.maxsize
    sweeper.sweep()
    print("done", flush=True)
"""


def run(faulty: FaultyStorage, program: str, root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(root)],
        env={**faulty.environment, "PYTHONPATH": ":".join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def order(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    print(line, file=process.stdin, flush=True)
    assert process.stdout.readline() == "done\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A save directory with the parts of a dead save of iteration 6."""
    made = tmp_path / "save"
    shard = made / file_names.iteration_dir(6) / file_names.shard_name(0, "b" * 12)
    shard.parent.mkdir(parents=True)
    shard.touch()
    return made


@pytest.fixture
def faulty(tmp_path: Path, root: Path) -> Iterator[FaultyStorage]:
    """Storage on which a checkpoint of iteration 5 has a manifest that other processes miss."""
    made = FaultyStorage(root, tmp_path)
    made.rule(late(3_600_000, "manifest.json"))
    committing = run(made, COMMIT, root)
    committing.communicate(timeout=60.0)
    assert committing.returncode == 0
    yield made
    made.heal()


def test_a_newer_checkpoint_survives_a_resume_that_does_not_see_it(
    root: Path, faulty: FaultyStorage
) -> None:
    before = listing(root)
    resuming = run(faulty, RESUME, root)
    order(resuming, "resume")
    assert listing(root) == before
    faulty.heal()
    order(resuming, "look again")
    assert not (root / file_names.iteration_dir(6)).exists()
    assert stored(root, 5).manifest.save_id == SAVE
    assert {name for name in before if "0000005" in name} <= listing(root)
    resuming.communicate(timeout=60.0)


def test_the_checkpoint_to_resume_from_stays_even_if_its_manifest_stays_hidden(
    root: Path, faulty: FaultyStorage
) -> None:
    """The trainers have read the manifest; their agent, on another node, does not see it."""
    before = listing(root)
    resuming = run(faulty, RESUME, root)
    order(resuming, "resume 5")
    order(resuming, "look again")
    assert not (root / file_names.iteration_dir(6)).exists()
    assert {name for name in before if "0000005" in name} <= listing(root)
    resuming.communicate(timeout=60.0)
