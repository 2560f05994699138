"""`flashckpt save-now` on a job of Megatron that trains on two nodes."""

from __future__ import annotations

import concurrent.futures
import re
from pathlib import Path

import pytest

from megatron_flashckpt.cli.commands import main
from tests.support.megatron_jobs import Result, committed, run_job, succeeded
from tests.support.trainer import eventually


def asked_to_save(where: Path, save: Path, **env: str) -> tuple[int, Result]:
    """Run a job, and the command beside it; return the command's exit status, and the job.

    The job saves nothing else before its last iteration.
    """
    arguments = [*("--num-layers", "1", "--bf16", "--use-distributed-optimizer")]
    arguments += ["--train-iters", "36", "--save-interval", "1000", "--save", str(save)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            run_job, where, "job", arguments, ranks=2, nodes=2, env={"PACE": "0.5", **env}
        )
        eventually("the run", lambda: list(save.glob("flashckpt/alive/*")) or job.done(), 60)
        status = main(["save-now", str(save)])
        return status, succeeded(job.result())


def test_all_ranks_save_the_iteration_that_the_command_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "save"
    status, done = asked_to_save(tmp_path, save)
    asked = capsys.readouterr()
    assert status == 0, asked.err
    named = re.fullmatch(r"iteration (\d+) will be saved, in .*\niter_0*\1: saved\n", asked.out)
    assert named is not None
    assert committed(save) == [int(named[1]), 36]
    saves = [(event["rank"], event["iteration"], event["calls"]) for event in done.named("save")]
    assert sorted(saves) == [(rank, n, []) for rank in (0, 1) for n in committed(save)]
    assert len(done.losses()) == 36


def test_a_rank_that_hears_nothing_costs_this_save_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others wait for it in no collective, and for this save only until its agent ends it."""
    save = tmp_path / "save"
    status, done = asked_to_save(tmp_path, save, DEAF="1", FLASHCKPT_WAIT="durable")
    assert status == 1
    assert " was not saved: rank 1 heard of the request too late" in capsys.readouterr().err
    assert committed(save) == [36]
    assert len(done.losses()) == 36
