"""The end of a job: the exit status and the last log lines report whether its saves are durable.

Saves fail because regular files occupy the paths of their iteration directories.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.megatron_jobs import REPO, Result, run_job

SCRIPT = REPO / "tests/support/jobs/ends.py"
MODEL = ["--num-layers", "1", "--bf16"]


def job(
    where: Path,
    *more: str,
    train_iters: int = 2,
    save_interval: int = 1,
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
    arguments += ["--save", str(save), "--save-interval", str(save_interval), *more]
    entry_point = "stock" if "SWAP" in env else "launch"
    options: dict[str, Any] = {
        "ranks": ranks,
        "entry_point": entry_point,
        "script": SCRIPT,
        "env": env,
    }
    return run_job(where, "ends", arguments, **options)


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


@pytest.mark.parametrize(("swap", "end"), [("", "fork raise 3"), ("1", "fork"), ("1", "exit 3")])
def test_a_failed_last_save_changes_only_a_successful_exit_status(
    tmp_path: Path, swap: str, end: str
) -> None:
    """Jobs with swapped imports, which use no launcher, end as jobs under the launcher do."""
    result = job(tmp_path, in_the_way=(2,), END=end, **({"SWAP": swap} if swap else {}))
    assert result.returncode == (1 if end == "fork" else 3)
    # A forked helper that exits by itself logs nothing and keeps its status.
    assert [event["status"] for event in result.named("child")] == [0] * ("fork" in end)
    line = verdict(result)
    assert f"; the newest durable checkpoint in {tmp_path}/save is iteration 1; " in line
    assert ("the exit status is the one that the script has chosen" in line) == (end != "fork")


def test_the_setting_keeps_the_status_of_a_script(tmp_path: Path) -> None:
    """A script may close its checkpointers before its last save."""
    env = {"FLASHCKPT_EXIT_NONZERO_UNLESS_DURABLE": "false", "SWAP": "1", "STORE_GONE": "1"}
    result = job(tmp_path, train_iters=3, save_interval=2, in_the_way=(3,), **env)
    assert result.returncode == 0
    assert verdict(result).startswith("the last save, iteration 3, is not durable: [Errno ")
    assert "the exit status is not changed ('exit_nonzero_unless_durable' is false)" in (
        verdict(result)
    )


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


def test_releases_without_a_finalize_call_report_a_save_before_the_next(tmp_path: Path) -> None:
    """Their loop has no `maybe_finalize_async_save`; the test leaves 0.17.1's own in place."""
    result = job(tmp_path, train_iters=19, save_interval=10, SWAP="1", OLD_LOOP="1")
    assert result.returncode == 0
    reported = {event["iteration"]: event["told"] for event in result.named("forward")}
    assert reported[10] == []
    assert reported[18] == [10]


def test_a_job_resumes_from_the_last_save_that_storage_refused(tmp_path: Path) -> None:
    """Finishing is not worse than crashing: the agents keep the only copy for hours."""
    env = {"FLASHCKPT_AGENT__KEEP_UNWRITTEN_S": "300"}
    result = job(tmp_path, in_the_way=(2,), ranks=2, **env)
    assert result.returncode == 1
    assert "; host memory of 1 node holds iteration 2 until " in verdict(result)
    (tmp_path / "save/iter_0000002").unlink()
    save = str(tmp_path / "save")
    arguments = ["--train-iters", "3", "--save-interval", "1", "--save", save, "--load", save]
    arguments = [*MODEL, *arguments, "--override-opt_param-scheduler"]
    again = run_job(tmp_path, "again", arguments, ranks=2, script=SCRIPT, entry_point="launch")
    assert again.returncode == 0
    # An attempt that was under way may have written it as soon as storage worked.
    assert re.search(r"iteration 2 was restored from (memory|storage)", again.log)
    assert (tmp_path / "save/latest_checkpointed_iteration.txt").read_text() == "3"
