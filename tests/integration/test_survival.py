"""One run of 8 iterations, ended four times in different ways, equals an uninterrupted run.

The run has five jobs:
1  SIGTERM to torchrun, with --exit-signal-handler, in iteration 3: saves and exits
2  SIGTERM to torchrun, without it, in iteration 5: dies at once; iteration 4 is staged
3  SIGKILL of torchrun and all ranks in iteration 6: iteration 5 is staged
4  SIGUSR1 to all ranks, with --exit-signal SIGUSR1, in iteration 7: saves and exits
5  trains to the end
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.support.megatron_jobs import (
    Result,
    await_no_agent,
    differing,
    run_job,
    succeeded,
    tensors,
)
from tests.support.stored import await_tracker, tracked
from tests.support.trainer import agents_under

MODEL = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer"]
RANKS = 2


@dataclasses.dataclass
class Runs:
    """Results of the five jobs, and of a job that was never interrupted."""

    where: Path
    whole: Result
    parts: list[Result]
    trackers: list[int]
    """Iteration in the tracker after each job and its agent's pending work had ended."""
    agents: list[int]
    """Number of agents at the same moments."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    where = tmp_path_factory.mktemp("survival")

    def job(name: str, save: Path, signals: str, *more: str) -> Result:
        arguments = [*MODEL, "--train-iters", "8", "--save", str(save), "--load", str(save)]
        # A slow machine takes long to start the next job.
        env = {"SIGNALS": signals, "FLASHCKPT_AGENT__GRACE_S": "200"}
        torchrun = "torchrun" in signals or "job" in signals
        return run_job(where, name, [*arguments, *more], ranks=RANKS, env=env, torchrun=torchrun)

    save = where / "parts"
    made = Runs(
        where, succeeded(job("whole", where / "whole", "", "--save-interval", "8")), [], [], []
    )
    handler = ("--exit-signal-handler", "--save-interval", "100")
    every_iteration = ("--save-interval", "1")
    for signals, arguments, expected in [
        ("TERM:torchrun:3", handler, 3),
        ("TERM:torchrun:5", every_iteration, 4),
        ("KILL:job:6", every_iteration, 5),
        ("USR1:ranks:7", (*handler, "--exit-signal", "SIGUSR1"), 7),
        ("", every_iteration, 8),
    ]:
        made.parts.append(job(f"part{len(made.parts) + 1}", save, signals, *arguments))
        if signals in ("TERM:torchrun:5", "KILL:job:6"):
            # The trainers are dead; their agent is still running.
            await_tracker(save, expected)
        else:
            await_no_agent(where)
        made.trackers.append(int(tracked(save)))
        made.agents.append(len(agents_under(where / "run")))
    return made


def test_no_way_to_end_a_job_loses_a_staged_save(runs: Runs) -> None:
    assert runs.trackers == [3, 4, 5, 7, 8]


def test_a_job_resumes_from_memory_if_its_agent_runs_else_from_storage(
    runs: Runs,
) -> None:
    restored = [
        re.findall(r"iteration (\d) was restored from (\w+)", job.log) for job in runs.parts
    ]
    assert restored == [
        [],
        [("3", "storage")],
        [("4", "memory")],
        [("5", "memory")],
        [("7", "storage")],
    ]
    read = [[event["read_nbytes"] for event in job.named("load")] for job in runs.parts]
    assert [len(of_job) for of_job in read] == [RANKS] * 5
    assert [any(of_job) for of_job in read] == [False, True, False, False, True]


def test_an_agent_ends_with_an_orderly_job_and_survives_a_crashed_one(
    runs: Runs,
) -> None:
    assert runs.agents == [0, 1, 1, 0, 0]


def test_the_log_distinguishes_blocked_staged_and_durable(runs: Runs) -> None:
    log = runs.whole.log
    assert re.search(r"iteration 8 staged, [\d.]+ MiB on rank 0, blocked [\d.]+ ms", log)
    assert "INFO:megatron_flashckpt" not in log, "each event has one line"
    assert re.search(r"iteration 8 durable after [\d.]+ s", log)


def test_five_jobs_train_like_one_uninterrupted_job(runs: Runs) -> None:
    expected = runs.whole.losses()
    losses_by_iteration: dict[int, list[tuple[int, str]]] = {}
    for job in runs.parts:
        for iteration, losses in job.losses().items():
            # The last job that trained an iteration to its end decides.
            if len(losses) == len(expected[iteration]):
                assert losses == expected[iteration], f"iteration {iteration}"
                losses_by_iteration[iteration] = losses
    assert sorted(losses_by_iteration) == list(range(1, 9))
    whole, parts = tensors(runs.where / "whole", 8), tensors(runs.where / "parts", 8)
    assert differing(whole, parts) == []
