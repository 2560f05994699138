"""Log of the agent: one line per expected error, and a copy beside the checkpoints."""

from __future__ import annotations

import errno
import logging
import os
import platform
import sys
from pathlib import Path

import pytest

from megatron_flashckpt.agent import log
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.errors import StorageError
from tests.agent.conftest import Node
from tests.support.trainer import eventually


@pytest.mark.parametrize(
    ("error", "is_expected"),
    [
        (OSError(errno.ENOSPC, "No space left"), True),
        (StorageError(errno.EIO, "I/O error"), True),
        (ZeroDivisionError("by 0"), False),
    ],
)
def test_only_an_unexpected_error_has_its_traceback(error: Exception, is_expected: bool) -> None:
    try:
        raise error
    except Exception:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "save %d", (3,), sys.exc_info())
    first, *others = log.BriefFormatter().format(record).splitlines()
    assert first.endswith(f"ERROR x: save 3: {error}" if is_expected else "ERROR x: save 3")
    assert others[-1:] == ([] if is_expected else ["ZeroDivisionError: by 0"])


def test_the_log_beside_the_checkpoints_moves_aside_and_keeps_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_ROTATE_NBYTES", 20)
    path = log.path_in(str(tmp_path), platform.node())
    for number in range(5):
        log.append_line(path, f"line {number} of 5\n")
    assert path.read_text() == "line 4 of 5\n"
    assert Path(f"{path}.1").read_text() == "line 2 of 5\nline 3 of 5\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_directory_that_hangs_or_is_away_does_not_stop_the_agent() -> None:
    reading, writing = os.pipe()
    handler = log.ThreadedHandler("hanging", lambda line: os.read(reading, 1))
    for number in range(5000):
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "%d", (number,), None))
    os.close(writing)
    os.close(reading)


def test_ls_names_host_and_path_of_the_log(
    node: Node, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_RUNTIME_DIR", str(node.runtime_dir))
    shared = log.path_in(str(root), platform.node())
    trainer = node.trainer(root)
    assert trainer.save(1).error is None
    assert not shared.exists()
    trainer.hang_up()
    # A restarted job may ask for the log; its agent runs already.
    trainer = node.trainer(root, config=node.config(log_in_save_directory=True))
    assert trainer.save(2).error is None
    eventually("the shared log", shared.exists)
    assert main(["ls", str(root)]) == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert f"log of this node's agent: {platform.node()}:{node.log(root)}" in out
    assert f"log beside the checkpoints: {shared}" in out
