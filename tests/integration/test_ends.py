"""The end of a job: the exit status and the last log lines report whether its saves are durable.

Saves fail because regular files occupy the paths of their iteration directories.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.megatron_lm import stock
from megatron_flashckpt.save import entry_points
from tests.support.megatron_jobs import REPO, Result, run_job

SCRIPT = REPO / "tests/support/jobs/ends.py"
MODEL = ["--num-layers", "1", "--bf16"]


def job(
    where: Path,
    *more: str,
    train_iters: int = 2,
    ranks: int = 1,
    in_the_way: tuple[int, ...] = (),
    **env: str,
) -> Result:
    """Train a small model and save it; `SWAP` selects swapped imports instead of the launcher."""
    save = where / "save"
    save.mkdir()
    for iteration in in_the_way:
        (save / f"iter_{iteration:07d}").write_text("in the way")
    arguments = [*MODEL, "--train-iters", str(train_iters)]
    arguments += ["--save", str(save), "--save-interval", "1", *more]
    entry_point = "stock" if "SWAP" in env else "launch"
    options: dict[str, Any] = {"entry_point": entry_point, "script": SCRIPT, "env": env}
    return run_job(where, "ends", arguments, ranks=ranks, **options)


def verdict(result: Result) -> str:
    """Return the log line that reports the result of the job's last save."""
    (line,) = re.findall(r"the last save, iteration .*", result.log)
    return line


def test_a_job_without_a_durable_save_logs_that_and_exits_with_1(
    tmp_path: Path,
) -> None:
    result = job(tmp_path, "--exit-interval", "2", in_the_way=(1, 2), ranks=2)
    assert "exiting program at iteration 2" in result.log, "Megatron itself exits with status 0"
    assert result.returncode == 1
    line = verdict(result)
    assert line.startswith("the last save, iteration 2, is not durable: [Errno ")
    assert f"; there is no durable checkpoint in {tmp_path}/save; " in line
    assert "the exit status is 1 ('exit_nonzero_unless_durable: false' turns that off)" in line
    assert "previous checkpoint is intact" not in result.log


@pytest.mark.parametrize(
    ("env", "status", "text"),
    [
        ({}, 3, "the exit status is the one that the script has chosen"),
        ({"SWAP": "1"}, 1, "the exit status is 1 "),
        (
            {"SWAP": "1", "FLASHCKPT_EXIT_NONZERO_UNLESS_DURABLE": "false"},
            0,
            "the exit status is not changed ('exit_nonzero_unless_durable' is false)",
        ),
    ],
)
def test_a_failed_last_save_changes_only_a_successful_exit_status(
    tmp_path: Path, env: dict[str, str], status: int, text: str
) -> None:
    """Jobs with swapped imports, which use no launcher, end as jobs under the launcher do."""
    result = job(tmp_path, in_the_way=(2,), END="0" if env else "3", **env)
    assert result.returncode == status
    # A forked helper that exits by itself logs nothing and keeps its status.
    assert [event["status"] for event in result.named("child")] == [0]
    line = verdict(result)
    assert f"; the newest durable checkpoint in {tmp_path}/save is iteration 1; " in line
    assert text in line


def test_a_save_waits_until_staged_or_durable_on_request(tmp_path: Path) -> None:
    """The script delays late copies until a save returns, except if it waits for durability."""
    result = job(
        tmp_path,
        train_iters=6,
        in_the_way=(4,),
        WAITS="none - durable durable",
        FLASHCKPT_WAIT="staged",
        FLASHCKPT_ON_FAILURE="raise",
    )
    saves = result.named("save")
    assert [save["iteration"] for save in saves] == [1, 2, 3]
    assert [save["copied"] for save in saves] == [False, True, True]
    assert saves[2]["committed"]
    assert "in save_checkpoint before its wait for a durable checkpoint, then" in result.log
    assert result.returncode == 1
    assert re.search(r"in save_checkpoint\n(.*\n)*.*SaveFailedError: \[Errno", result.log)


def test_saves_are_reported_before_each_step_of_a_loop_that_never_polls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Old releases have no `maybe_finalize_async_save`."""
    calls: list[str] = []
    monkeypatch.setattr(entry_points, "_polls_every_iteration", lambda: False)
    monkeypatch.setattr(entry_points.session, "finalize", lambda blocking: calls.append("poll"))
    monkeypatch.setattr(stock, "original", lambda *_: lambda: calls.append("step"))
    monkeypatch.setattr(stock, "get_args", lambda: SimpleNamespace(save=None))
    entry_points.train_step()
    assert calls == ["poll", "step"]
