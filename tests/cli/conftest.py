"""Fixtures of the tests of the command line."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.agent import alive
from megatron_flashckpt.agent.alive import Alive
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.storage.posix_store import PosixStore

Run = Callable[..., "CommandResult"]


class CommandResult:
    """Output and exit status of a command."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err
        self.lines = [line.rstrip() for line in out.splitlines()]

    def row(self, *start: str) -> list[str]:
        """Return the cells of the only table row that starts with the cells `start`."""
        rows = [re.split(r"\s{2,}", line.strip()) for line in self.lines]
        (match,) = (row for row in rows if tuple(row[: len(start)]) == start)
        return match


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in [name for name in os.environ if name.startswith("FLASHCKPT_")]:
        monkeypatch.delenv(name)

    def run(*arguments: object) -> CommandResult:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return CommandResult(status, *capsys.readouterr())

    return run


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return tmp_path / "save"


def sign_of(run: str, **changes: object) -> Alive:
    """Return the sign of life of a run on another host."""
    sign = Alive(
        run=run,
        state="training",
        renewed=0,
        renewed_at=77.0,
        host="elsewhere",
        pid=1234,
        started=0,
        machine="another machine",
    )
    return msgspec.structs.replace(sign, **changes)


def keep_alive(patch: pytest.MonkeyPatch, root: Path, sign: Alive) -> None:
    """Let a run save to `root`, and renew its sign of life before each look at it."""
    alive.put(PosixStore(root), sign)
    renewals = itertools.count(1)
    patch.setattr(
        alive,
        "_shown",
        lambda *_: (msgspec.structs.replace(sign, renewed=next(renewals)), None),
    )


def only_line(ran: CommandResult, pattern: str, status: int = 1) -> None:
    """Assert that a command failed with exactly one line, on stderr."""
    assert ran.status == status
    assert ran.out == ""
    assert re.fullmatch(rf"flashckpt: {pattern}\n", ran.err), ran.err
