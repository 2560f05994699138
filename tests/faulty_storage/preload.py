"""Storage with faults for real processes: a preloaded library that intercepts their file calls.

The library `faulty.c` is compiled once. It describes its rules, and `test_preload.py` tests them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

SOURCE = Path(__file__).parent / "faulty.c"
#: All calls that rules can name, except calls that no agent uses.
CALLS = ("open", "read", "write", "fsync", "close", "rename", "link", "unlink", "mkdir", "rmdir")
CALLS += ("list", "stat", "fallocate", "truncate")
FOREVER = -1


class Hit(NamedTuple):
    """A call that a rule made fail."""

    pid: int
    call: str
    number: int
    path: str


@functools.cache
def library() -> Path:
    """Return the compiled library, which is removed when this process ends."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        import pytest  # here: forked ranks import this module, but not pytest

        pytest.skip("there is no C compiler for the library in front of the file calls")
    home = tempfile.TemporaryDirectory(prefix="flashckpt-faulty-")
    _HOMES.append(home)
    built = Path(home.name) / "faulty.so"
    made = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(SOURCE), "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return built


_HOMES: list[tempfile.TemporaryDirectory[str]] = []


def fail(
    call: str,
    number: int,
    part: str = "*",
    *,
    skip: int = 0,
    times: int = FOREVER,
    done: bool = False,
) -> str:
    """Return the rule that makes a call fail; with `done` the call takes effect before it fails."""
    assert call in CALLS
    return f"{'after' if done else 'fail'} {call} {number} {skip} {times} {part}"


def late(milliseconds: int, part: str = "*") -> str:
    """Return the rule that hides new names from other processes for `milliseconds`."""
    return f"late {milliseconds} {part}"


def sometimes(
    call: str,
    rate: int,
    seed: int,
    numbers: Iterable[int],
    part: str = "*",
    *,
    done: bool = False,
) -> str:
    """Return the rule that makes `rate` of 10,000 calls fail, each with one of the error `numbers`.

    With `done` these calls take effect before they fail. `seed` chooses the calls that fail.
    """
    assert call in CALLS
    listed = ",".join(map(str, numbers))
    return f"sometimes{'-after' if done else ''} {call} {rate} {seed} {listed} {part}"


def sometimes_late(milliseconds: int, seed: int, part: str = "*") -> str:
    """Return the rule that hides new names from other processes for up to `milliseconds`."""
    return f"sometimes-late {milliseconds} {seed} {part}"


def limit_errors(most: int, milliseconds: int) -> str:
    """Return the rule that limits errors of `sometimes` per process: `most` in `milliseconds`."""
    return f"calm {most} {milliseconds}"


def no_fallocate() -> str:
    """Return the rule of a file system that cannot reserve space."""
    return fail("fallocate", errno.EOPNOTSUPP)


class FaultyStorage:
    """Faults for the processes that use the files below `root`."""

    def __init__(self, root: Path, home: Path) -> None:
        """Write the rules into `home`, an existing directory that is not below `root`."""
        self._root = root
        self._rules = home / "faults"
        #: Rules that stood in the file before; they stay in force.
        self._always = []
        if self._rules.exists():
            lines = self._rules.read_text().splitlines()
            self._always = [line for line in lines if not line.startswith("root ")]
        library()  # skips the test where there is no compiler
        self.heal()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a process that shall meet the faults."""
        return {"LD_PRELOAD": str(library()), "FAULTY_STORAGE": str(self._rules)}

    def rule(self, *rules: str) -> None:
        """Replace all rules by `rules`, and restart all counts."""
        draft = self._rules.with_suffix(".new")
        draft.write_text("\n".join([f"root {self._root}", *self._always, *rules, ""]))
        draft.replace(self._rules)

    def heal(self) -> None:
        self.rule()

    def hits(self) -> list[Hit]:
        """Return all calls that have failed so far."""
        try:
            lines = self._rules.with_suffix(".hits").read_text().splitlines()
        except FileNotFoundError:
            return []
        split = (line.split(" ", 3) for line in lines)
        return [Hit(int(pid), call, int(number), path) for pid, call, number, path in split]

    @contextlib.contextmanager
    def under_agents(self) -> Iterator[None]:
        """Let the agents that this process starts in the context meet the faults."""
        run = subprocess.run

        def start(command: list[str], **named: Any) -> subprocess.CompletedProcess[Any]:
            if "megatron_flashckpt.agent" in command:
                named["env"] = {**named["env"], **self.environment}
            return run(command, **named)

        with mock.patch.object(subprocess, "run", start):
            yield
