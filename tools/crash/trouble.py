"""Faulty storage for every process of any cell.

All agents, and all ranks in their own processes, work on `tests.faulty_storage`. This storage
cannot reserve space, shows new names up to a second late, and returns transient errors from every
call, chosen by a seed. A process gets at most two errors in ten seconds. Each step is retried, so
every save must still be committed. Trainers in the process of the matrix have no faults, because
they only claim their directory. The checks have none either.

A cell calls `begin` where its errors begin, and `end` before its last save, which must remove the
files that an agent could not remove because of an error. Without `prepare` both do nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_flashckpt.error_classes import TABLE
from megatron_flashckpt.load import late_names
from megatron_flashckpt.storage import retrying_store
from tests.faulty_storage.preload import (
    CALLS,
    library,
    limit_errors,
    no_fallocate,
    sometimes,
    sometimes_late,
)

#: Time after which all names are visible.
LATE_S = 1.0
#: Environment variables that an agent takes from the process that starts it.
VARIABLES = ("LD_PRELOAD", "FAULTY_STORAGE")
#: File with the rules of a cell, next to its save directory; `FaultyStorage` uses it too.
_RULES = "faults"
_SEED = "seed "
_MISSED = "missed-step"
#: Failing calls per 10,000. An agent makes some thousand calls in a cell.
_RATE = 100
_DONE_RATE = 300
#: Half of the errors that the shortest retries of the package tolerate.
_MOST, _WITHIN_S = 2, 10
_PASSING = sorted(number for number, error in TABLE.items() if error.may_pass)
#: close(2) documents this error, and the package treats it as transient.
_OF_CLOSE = (errno.EIO,)
#: A client that repeats a request may get an error although the first request succeeded.
_MAY_BE_DONE = ("rename", "link", "unlink", "mkdir", "rmdir")


def prepare(home: Path, seed: int, cell: object) -> None:
    """Put the cell in the empty directory `home` on faulty storage."""
    of_cell = zlib.crc32(f"{seed}: {cell}".encode())
    _write(home, [f"{_SEED}{of_cell}"], of_cell)


def errors(root: Path | str, most: int = _MOST, within_s: int = _WITHIN_S) -> list[str]:
    """Return the rules of the transient errors of a cell; empty for a cell without faults.

    Args:
        most: largest number of errors of a process within `within_s` seconds.
    """
    seed = _seed(root)
    if seed is None:
        return []
    refused = [call for call in CALLS if call != "fallocate"]
    return [
        limit_errors(most, 1000 * within_s),
        *(
            sometimes(call, _RATE, seed, _OF_CLOSE if call == "close" else _PASSING)
            for call in refused
        ),
        *(sometimes(call, _DONE_RATE, seed, _PASSING, done=True) for call in _MAY_BE_DONE),
    ]


def begin(root: Path | str) -> None:
    """Start the errors of calls below the save directory."""
    seed = _seed(root)
    if seed is not None:
        _write(Path(root).parent, [f"{_SEED}{seed}", *errors(root)], seed)


def end(root: Path | str) -> None:
    """End the errors of calls below the save directory."""
    seed = _seed(root)
    if seed is not None:
        _write(Path(root).parent, [f"{_SEED}{seed}"], seed)


def await_names(root: Path | str) -> None:
    """Wait until all processes see all names below the save directory.

    Called before another job starts, because schedulers need longer than this delay.
    """
    if is_on_faulty_storage(root):
        time.sleep(LATE_S)


def is_on_faulty_storage(root: Path | str) -> bool:
    """Return whether the cell of this save directory is on faulty storage."""
    return _seed(root) is not None


def environment(root: Path | str) -> dict[str, str]:
    """Return environment variables for processes on this save directory, and their agents."""
    if not is_on_faulty_storage(root):
        return {}
    return {
        "LD_PRELOAD": str(library()),
        "FAULTY_STORAGE": str(Path(root).parent / _RULES),
        "FLASHCKPT_AGENT__ENVIRONMENT": f"[{', '.join(VARIABLES)}]",
        # A load waits as long for a tracker that a killed agent has not moved, and the probe for
        # the files of other nodes.
        "FLASHCKPT_PROBE_WAIT_S": "10",
    }


def expect_faults() -> None:
    """Tell this process what its storage is like: errors pass at once, and names come late.

    The package would take the file system for a local one, whose names are never late.
    """
    retrying_store.PAUSES_S = (0.1, 0.2, 0.4, 0.4)
    late_names.LOCAL.clear()


def failed_calls(home: Path) -> list[str]:
    """Return the names of the calls that failed in a cell."""
    try:
        lines = (home / f"{_RULES}.hits").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [line.split(" ", 2)[1] for line in lines]


def note_missed_step(root: Path | str) -> None:
    """Note that an error kept the agent of a cell from its failpoint, so nothing was stopped."""
    (Path(root).parent / _MISSED).touch()


def has_missed_step(home: Path) -> bool:
    """Return whether a cell ended without reaching its failpoint."""
    return (home / _MISSED).exists()


@contextlib.contextmanager
def everywhere() -> Iterator[None]:
    """Give processes that start inside the `with` block the faults of their cell.

    An agent belongs to the cell of its save directory. Ranks are forked from a process that starts
    with the first cell; if that process started before the block, its ranks have no faults.
    """
    run = subprocess.run

    def start(command: list[str], **named: Any) -> subprocess.CompletedProcess[Any]:
        if "megatron_flashckpt.agent" in command:
            root = Path(command[command.index("--root") + 1])
            named["env"] = {**named["env"], **environment(root)}
        return run(command, **named)

    library()  # skips the test if there is no compiler
    preloaded = {"LD_PRELOAD": str(library())}
    with mock.patch.dict(os.environ, preloaded), mock.patch.object(subprocess, "run", start):
        yield


def _seed(root: Path | str) -> int | None:
    """Return the seed of a cell; None if it has no faults."""
    with contextlib.suppress(FileNotFoundError):
        for line in (Path(root).parent / _RULES).read_text().splitlines():
            if line.startswith(_SEED):
                return int(line.removeprefix(_SEED))
    return None


def _write(home: Path, rules: list[str], seed: int) -> None:
    late = sometimes_late(int(1000 * LATE_S), seed)
    draft = home / f"{_RULES}.new"
    draft.write_text("\n".join([f"root {home / 'save'}", no_fallocate(), late, *rules, ""]))
    draft.replace(home / _RULES)
