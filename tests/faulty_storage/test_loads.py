"""Loads in a process whose storage has faults at each of their calls."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.file_format import file_names
from tests.faulty_storage.preload import FaultyStorage, fail
from tests.support.checkpoints import make

#: Program that loads the tracker's whole checkpoint per input line, and prints the result.
LOAD = """
import json, logging, os, sys
from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.lineage import choose
from megatron_flashckpt.errors import FlashCkptError, is_damage
from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage import retrying_store

logging.basicConfig()
retrying_store.PAUSES_S, retrying_store.UNTIL_DEADLINE = (0.001,) * 3, ()

def load():
    store = retrying_store.RetryingStore(PosixStore(sys.argv[1]))
    ((save, _),) = choose(read_facts(store)).candidates
    stored = StoredCheckpoint(store, save, read_manifest(store, save))
    stored.common()
    for rank in range(len(stored.manifest.shards)):
        stored.read_chunk(rank, 0, [memoryview(bytearray(stored.data_nbytes(rank)))])

for line in sys.stdin:
    try:
        load()
        print(json.dumps([None, None]), flush=True)
    except FlashCkptError as error:
        print(json.dumps([str(error), is_damage(error)]), flush=True)
"""
PASSING = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN)
#: The calls of a load, each with a part of the file's path.
STEPS = [
    ("open", file_names.TRACKER),
    ("read", file_names.TRACKER),
    ("list", "*"),
    ("list", "iter_"),
    ("stat", ".end"),
    ("open", ".end"),
    ("read", ".end"),
    ("stat", "common"),
    ("open", "common"),
    ("read", "common"),
    ("open", "safetensors"),
    ("read", "safetensors"),
    ("stat", "safetensors"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A save directory with a checkpoint."""
    return make(tmp_path / "save").root


def start(faulty: FaultyStorage, script: str, root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(root)],
        env={**faulty.environment, "PYTHONPATH": ":".join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def again(process: subprocess.Popen[str]) -> list[Any]:
    """Let the process do its work once more; return the result that it prints."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(file=process.stdin, flush=True)
    line = process.stdout.readline()
    assert line, process.communicate(timeout=60.0)
    return list(json.loads(line))


def test_a_load_survives_transient_errors_and_names_lasting_ones(
    tmp_path: Path, root: Path
) -> None:
    faulty = FaultyStorage(root, tmp_path)
    loading = start(faulty, LOAD, root)

    def load() -> list[Any]:
        return again(loading)

    retries = 0
    for n, (call, part) in enumerate(STEPS):
        number = PASSING[n % len(PASSING)]
        faulty.rule(fail(call, number, part, times=3))
        before = len(faulty.hits())
        assert load() == [None, None], f"{errno.errorcode[number]} at {call} of {part}"
        assert len(faulty.hits()) == before + 3
        retries += 3
    lasting = {errno.ETIMEDOUT: False, errno.EHOSTDOWN: False, errno.EIO: True, errno.ESTALE: True}
    for number, damages in lasting.items():
        faulty.rule(fail("read", number, "safetensors"))
        error, is_damage = load()
        assert error is not None
        assert "rank_00000" in error
        assert is_damage is damages
        assert ("storage is unavailable" in error) is not damages
        retries += 3
    _, log = loading.communicate(timeout=60.0)
    assert loading.returncode == 0
    assert len([line for line in log.splitlines() if "; retry " in line]) == retries
