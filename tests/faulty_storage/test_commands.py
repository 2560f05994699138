"""Commands that read a save directory whose storage has faults at each of their calls."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.writers.flashckpt import write_ours
from megatron_flashckpt.convert.writers.torch_dist import write_torch_dist
from tests.convert.made import contents
from tests.faulty_storage.preload import FaultyStorage, fail

#: Program that runs the command in each input line, and prints its status and its output.
COMMANDS = """
import contextlib, io, json, sys
from megatron_flashckpt.cli import main
from megatron_flashckpt.storage import retrying_store

retrying_store.PAUSES_S, retrying_store.UNTIL_DEADLINE = (0.001,) * 3, ()

for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(json.loads(line))
    print(json.dumps([status, out.getvalue() + err.getvalue()]), flush=True)
"""
PASSING = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN)
#: The calls of each command, each with a part of the file's path.
LISTING = [("list", "*"), ("list", "iter_"), ("open", "latest"), ("open", ".end")]
READING = [*LISTING[2:], ("read", ".end")]
DATA = [("read", ".common"), ("open", "safetensors"), ("read", "safetensors")]
STEPS = {
    "ls": LISTING,
    "inspect": READING,
    "verify": [*READING, *DATA],
    "convert": [*READING, *DATA],
    "convert torch_dist": [
        *(("open", name) for name in ("latest", ".metadata", "common.pt", ".distcp")),
        ("read", ".metadata"),
        ("read", ".distcp"),
    ],
}
#: Reads of objects in .distcp files, before those of tensors.
OBJECTS = 30


class Runner:
    """A process that runs commands on faulty storage."""

    def __init__(self, root: Path, home: Path) -> None:
        self.faulty = FaultyStorage(root, home)
        self._home = home
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMANDS],
            env={**self.faulty.environment, "PYTHONPATH": ":".join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, command: str, root: Path) -> tuple[int, str]:
        """Run `command` on a save directory below `root`; return its status and its output."""
        self._count += 1
        destination = str(self._home / f"converted{self._count}")
        arguments = {
            "convert": ["convert", str(root / "ours"), destination, "--to", "safetensors"],
            "convert torch_dist": [
                *("convert", str(root / "torch_dist"), destination, "--to", "safetensors")
            ],
        }.get(command, [command, str(root / "ours")])
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        status, output = json.loads(self._process.stdout.readline())
        return status, output

    def close(self) -> None:
        self._process.communicate(timeout=60.0)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    home = tmp_path_factory.mktemp("commands")
    root = home / "storage"
    write_ours(contents(), root / "ours", Options())
    write_torch_dist(contents(), root / "torch_dist", Options())
    made = Runner(root, home)
    yield root, made
    made.close()


@pytest.mark.parametrize("command", STEPS)
def test_a_command_survives_transient_errors(runner: tuple[Path, Runner], command: str) -> None:
    root, process = runner
    for n, (call, part) in enumerate(STEPS[command]):
        number = PASSING[n % len(PASSING)]
        before = len(process.faulty.hits())
        skip = OBJECTS if (call, part) == ("read", ".distcp") else 0
        process.faulty.rule(fail(call, number, part, skip=skip, times=3))
        status, output = process.run(command, root)
        fault = f"{errno.errorcode[number]} at {call} of {part}: {output}"
        assert status == 0, fault
        assert len(process.faulty.hits()) == before + 3, fault
        assert output.count("; retry ") == 3, fault
        assert "damage" not in output, fault


@pytest.mark.parametrize("command", ["ls", "verify", "convert torch_dist"])
def test_a_command_names_an_error_that_lasts(runner: tuple[Path, Runner], command: str) -> None:
    root, process = runner
    part = {"ls": ".end", "verify": "safetensors", "convert torch_dist": ".distcp"}[command]
    process.faulty.rule(fail("read", errno.EIO, part))
    status, output = process.run(command, root)
    assert "reports an I/O error" in output, output
    assert "cannot read" in output, output
    assert "damaged" not in output, output
    assert status == (0 if command == "ls" else 1), output
