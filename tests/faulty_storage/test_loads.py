"""Loads and probes in processes whose storage has faults at each of their calls."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.agent.commit import outcome_of
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix import PosixStorage
from tests.faulty_storage.preload import FaultyStorage, append_only, fail, no_fallocate
from tests.support.persisting import persisted
from tests.support.trainer import eventually

#: Program that loads the tracker's whole checkpoint per input line, and prints the result.
LOAD = """
import json, logging, os, sys
from megatron_flashckpt.catalog import listing
from megatron_flashckpt.errors import FlashCkptError, is_damage
from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.storage import patient
from megatron_flashckpt.storage.posix import PosixStorage

logging.basicConfig()
patient.RETRIES_S = (0.001, 0.001, 0.001)

def load():
    storage = patient.RetryingStorage(PosixStorage(sys.argv[1]))
    iteration = listing.chosen_iteration(storage)
    assert listing.committed_iterations(storage) == [iteration]
    stored = StoredCheckpoint(storage, iteration, read_manifest(storage, iteration))
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
PROBE = """
import json, sys
from megatron_flashckpt.save import probe
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.storage import patient
from megatron_flashckpt.storage.posix import PosixStorage

patient.RETRIES_S = (0.001, 0.001, 0.001)

for line in sys.stdin:
    try:
        probe.check(PosixStorage(sys.argv[1]), 0, is_first_of_node=True, wait_s=60.0)
        print(json.dumps([None]), flush=True)
    except StorageError as error:
        print(json.dumps([str(error)]), flush=True)
"""
PASSING = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN)
#: The calls of a load, each with a part of the file's path.
STEPS = [
    ("open", file_names.TRACKER),
    ("read", file_names.TRACKER),
    ("list", "*"),
    ("list", "iter_"),
    ("stat", "manifest.json"),
    ("open", "manifest.json"),
    ("read", "manifest.json"),
    ("stat", "common"),
    ("open", "common"),
    ("read", "common"),
    ("open", "safetensors"),
    ("read", "safetensors"),
    ("stat", "safetensors"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A save directory with a checkpoint of two ranks."""
    made = tmp_path / "save"
    storage = PosixStorage(made)
    saves = [persisted(storage, "a" * 12, rank, 2) for rank in range(2)]
    assert [outcome_of(save, 60.0) for save in saves] == [(True, None)] * 2
    return made


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


#: Rules, and the operation that the probe then cannot do.
PROBED: dict[str, tuple[tuple[str, ...], str | None]] = {
    "append only": ((append_only(), no_fallocate()), "write at any position of a file"),
    "EPERM of rename": ((fail("rename", errno.EPERM),), "rename a file"),
    "no rename": ((fail("rename", errno.ENOSYS),), "rename a file"),
    "quota": ((fail("close", errno.EDQUOT, "probe"),), "write at any position of a file"),
    "no fallocate": ((no_fallocate(),), None),
    "no fsync of files": (
        (fail("fsync", errno.EINVAL, "probe"),),
        "write at any position of a file",
    ),
    "no fsync of directories": ((fail("fsync", errno.EINVAL, "save", skip=1),), None),
}


def test_a_probe_tries_the_operations_of_saves(tmp_path: Path) -> None:
    root = tmp_path / "save"
    root.mkdir()
    faulty = FaultyStorage(root, tmp_path)
    probing = start(faulty, PROBE, root)
    for name, (rules, refused) in PROBED.items():
        before = len(faulty.hits())
        faulty.rule(*rules)
        (message,) = again(probing)
        assert len(faulty.hits()) > before, f"{name}: the probe did not meet the fault"
        if refused is None:
            assert message is None, name
        else:
            cannot = f"{root}: this node cannot {refused} in the save directory"
            assert cannot in message, f"{name}: {message}"
    probing.communicate(timeout=60.0)
    assert probing.returncode == 0


#: The calls of a probe, each with a part of the file's path.
PROBE_STEPS = [
    ("open", "probe"),
    ("write", "probe"),
    ("fsync", "probe"),
    ("close", "probe"),
    ("fsync", "save"),
    ("rename", "probe"),
    ("list", "save"),
    ("read", "probe"),
    ("stat", "probe"),
    ("unlink", "probe"),
]


def test_a_probe_survives_transient_errors_and_names_a_lasting_one(tmp_path: Path) -> None:
    root = tmp_path / "save"
    root.mkdir()
    faulty = FaultyStorage(root, tmp_path)
    probing = start(faulty, PROBE, root)
    for n, (call, part) in enumerate(PROBE_STEPS):
        number = PASSING[n % len(PASSING)]
        before = len(faulty.hits())
        faulty.rule(fail(call, number, part, times=2))
        fault = f"{errno.errorcode[number]} at {call} of {part}"
        assert again(probing) == [None], fault
        # The probe makes its last call in the background.
        eventually(f"{fault} is met", lambda: len(faulty.hits()) == before + 2)  # noqa: B023
        eventually("nothing is left", lambda: not list(root.iterdir()))
    faulty.rule(fail("rename", errno.ESTALE, "probe"))
    (error,) = again(probing)
    assert f"{root}: this node cannot rename a file" in error
    assert len(faulty.hits()) == 2 * len(PROBE_STEPS) + 4
    probing.communicate(timeout=60.0)
    assert probing.returncode == 0
