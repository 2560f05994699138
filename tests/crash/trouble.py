"""Storage with faults under every process of a cell, whatever the cell is about.

All agents, and all ranks that are processes of their own, work on `tests.faulty_storage`: it cannot
reserve space, its new names come up to a second late, and errors that pass are met at every call,
as a seed says. A process meets two of them in ten seconds at most: each step is tried again, so
every save must be committed all the same. Trainers of the matrix's own process have no faults:
they only claim their directory. Neither have the checks, which want to know what there is.

A cell calls `begin` where its errors begin, and `end` before its last save: what an error has kept
an agent from removing must go after that. Without `prepare` both do nothing.
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
from megatron_flashckpt.storage import patient
from tests.faulty_storage.preload import (
    CALLS,
    calm,
    library,
    no_fallocate,
    sometimes,
    sometimes_late,
)

#: All names are visible after so long.
LATE_S = 1.0
#: What an agent needs of the environment of the process that starts it.
VARIABLES = ("LD_PRELOAD", "FAULTY_STORAGE")
#: The rules of a cell, beside its save directory: where `FaultyStorage` has them, too.
_RULES = "faults"
_SEED = "seed "
#: Of 10,000 calls. An agent makes some thousand calls in a cell.
_RATE = 100
_DONE_RATE = 300
#: Half of what the shortest retries of the package bear.
_MOST, _WITHIN_S = 2, 10
_PASSING = sorted(number for number, it in TABLE.items() if it.may_pass)
#: close(2) names it, and the package takes it for one that may pass.
_OF_CLOSE = (errno.EIO,)
#: A client that sends a request again may be told an error though the first one was carried out.
_MAY_BE_DONE = ("rename", "link", "unlink", "mkdir", "rmdir")


def prepare(home: Path, seed: int, cell: object) -> None:
    """Let the cell in the empty directory `home` be on storage with faults."""
    of_cell = zlib.crc32(f"{seed}: {cell}".encode())
    _write(home, [f"{_SEED}{of_cell}"], of_cell)


def errors(root: Path, most: int = _MOST, within_s: int = _WITHIN_S) -> list[str]:
    """Return the rules of the errors that pass, for a cell with faults; none without.

    Args:
        most: how many of them a process meets within so many seconds.
    """
    seed = _seed(root.parent)
    if seed is None:
        return []
    refused = [call for call in CALLS if call != "fallocate"]
    return [
        calm(most, 1000 * within_s),
        *(
            sometimes(call, _RATE, seed, _OF_CLOSE if call == "close" else _PASSING)
            for call in refused
        ),
        *(sometimes(call, _DONE_RATE, seed, _PASSING, done=True) for call in _MAY_BE_DONE),
    ]


def begin(root: Path) -> None:
    """From now on calls below the save directory meet errors."""
    seed = _seed(root.parent)
    if seed is not None:
        _write(root.parent, [f"{_SEED}{seed}", *errors(root)], seed)


def end(root: Path) -> None:
    """No call below the save directory meets an error any more."""
    seed = _seed(root.parent)
    if seed is not None:
        _write(root.parent, [f"{_SEED}{seed}"], seed)


def await_names(root: Path) -> None:
    """Return when all names that there are below the save directory are visible to all processes.

    Called before another job starts: schedulers take longer, too.
    """
    if is_troubled(root):
        time.sleep(LATE_S)


def is_troubled(root: Path) -> bool:
    """Return whether the cell of this save directory is on storage with faults."""
    return _seed(root.parent) is not None


def environment(root: Path) -> dict[str, str]:
    """Return what processes on this save directory, and their agents, are started with."""
    if not is_troubled(root):
        return {}
    return {
        "LD_PRELOAD": str(library()),
        "FAULTY_STORAGE": str(root.parent / _RULES),
        "FLASHCKPT_AGENT__ENVIRONMENT": f"[{', '.join(VARIABLES)}]",
    }


def retry_at_once() -> None:
    """Let this process retry within a second what it reads: errors of these tests pass at once."""
    patient.RETRIES_S = (0.1, 0.2, 0.4)


def met(home: Path) -> list[str]:
    """Return the calls that were refused in a cell, by name."""
    try:
        lines = (home / f"{_RULES}.hits").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [line.split(" ", 2)[1] for line in lines]


@contextlib.contextmanager
def everywhere() -> Iterator[None]:
    """Have what this process starts meanwhile see the faults of the cell that it belongs to.

    An agent belongs to the cell of its save directory. Ranks are forked from a process that is
    started with the first cell, and have no faults if it was started before.
    """
    run = subprocess.run

    def start(command: list[str], **named: Any) -> subprocess.CompletedProcess[Any]:
        if "megatron_flashckpt.agent" in command:
            root = Path(command[command.index("--root") + 1])
            named["env"] = {**named["env"], **environment(root)}
        return run(command, **named)

    library()  # skips a test where there is no compiler
    preloaded = {"LD_PRELOAD": str(library())}
    with mock.patch.dict(os.environ, preloaded), mock.patch.object(subprocess, "run", start):
        yield


def _seed(home: Path) -> int | None:
    """Return the seed of a cell; None if it has no faults."""
    with contextlib.suppress(FileNotFoundError):
        for line in (home / _RULES).read_text().splitlines():
            if line.startswith(_SEED):
                return int(line.removeprefix(_SEED))
    return None


def _write(home: Path, rules: list[str], seed: int) -> None:
    late = sometimes_late(int(1000 * LATE_S), seed)
    draft = home / f"{_RULES}.new"
    draft.write_text("\n".join([f"root {home / 'save'}", no_fallocate(), late, *rules, ""]))
    draft.replace(home / _RULES)
