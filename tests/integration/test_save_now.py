"""`flashckpt save-now` on a job of Megatron that trains on two nodes."""

from __future__ import annotations

import concurrent.futures
import re
from pathlib import Path

import pytest

from megatron_flashckpt.cli.commands import main
from tests.support.megatron_jobs import committed, run_job, succeeded
from tests.support.trainer import eventually


def test_all_ranks_save_the_iteration_that_the_command_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job saves nothing else before its last iteration."""
    save = tmp_path / "save"
    arguments = [*("--num-layers", "1", "--bf16", "--use-distributed-optimizer")]
    arguments += ["--train-iters", "36", "--save-interval", "1000", "--save", str(save)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            run_job, tmp_path, "job", arguments, ranks=2, nodes=2, env={"PACE": "0.5"}
        )
        eventually("the run", lambda: list(save.glob("flashckpt/alive/*")) or job.done(), 60)
        status = main(["save-now", str(save)])
        done = succeeded(job.result())
    asked = capsys.readouterr()
    assert status == 0, asked.err
    named = re.fullmatch(r"iteration (\d+) will be saved, in .*\niter_0*\1: saved\n", asked.out)
    assert named is not None
    assert committed(save) == [int(named[1]), 36]
    saves = [(event["rank"], event["iteration"], event["calls"]) for event in done.named("save")]
    assert sorted(saves) == [(rank, n, []) for rank in (0, 1) for n in committed(save)]
    assert len(done.losses()) == 36
