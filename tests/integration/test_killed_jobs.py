"""A training job that is killed repeatedly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_flashckpt.cli.commands import main
from tests.support.megatron_jobs import await_no_agent, committed, run_job, succeeded

MODEL = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer"]


def test_a_job_killed_three_times_resumes_bit_for_bit_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank is killed in iteration 4, the other rank in 6, and the first rank in 6 again."""
    save = tmp_path / "save"
    result = succeeded(
        run_job(
            tmp_path,
            "job",
            [
                *(*MODEL, "--train-iters", "8", "--save-interval", "2"),
                *("--save", str(save), "--load", str(save)),
            ],
            ranks=2,
            max_restarts=3,
            env={"KILL": "1:4 0:6 1:6"},
        )
    )
    restored = re.findall(r"iteration (\d+) was restored from (\w+)", result.log)
    assert restored == [("2", "memory"), ("4", "memory"), ("4", "memory")]
    attempts = [result.losses(attempt) for attempt in range(4)]
    for earlier, later, iteration in ((0, 1, 3), (1, 2, 5), (2, 3, 5)):
        assert sorted(attempts[earlier][iteration]) == sorted(attempts[later][iteration])
    assert sorted(attempts[3]) == [5, 6, 7, 8]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "8"
    assert main(["verify", str(save), "--all"]) == 0, capsys.readouterr().out
    assert committed(save) == [2, 4, 6, 8]
    await_no_agent(tmp_path)
