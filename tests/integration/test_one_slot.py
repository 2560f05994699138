"""`slots: 1` under real Megatron: restarts from memory, and from storage after a torn copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.failpoints import VARIABLE
from tests.support.megatron_jobs import (
    Result,
    await_no_agent,
    differing,
    run_job,
    succeeded,
    tensors,
)

MODEL = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer"]
RANKS = 2
ONE = {"FLASHCKPT_SLOTS": "1"}
#: Job -> environment that kills a rank, and the source from which the restarted attempt resumes.
RESTARTS = {
    "killed-between-saves": ({"KILL": "1:5"}, "memory"),
    "killed-in-the-copy": ({VARIABLE: "rank1:save.staging:2:KILL"}, "storage"),
}


def run(where: Path, name: str, **kwargs: object) -> Result:
    save = str(where / name)
    schedule = ["--train-iters", "6", "--save", save, "--load", save, "--save-interval", "3"]
    env = {**ONE, **kwargs.pop("env", {})}
    return succeeded(run_job(where, name, [*MODEL, *schedule], ranks=RANKS, env=env, **kwargs))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    where = tmp_path_factory.mktemp("one")
    return where, run(where, "whole")


def assert_continues_as(
    whole: tuple[Path, Result], name: str, result: Result, attempt: int
) -> None:
    where, uninterrupted = whole
    expected, losses = uninterrupted.losses(), result.losses(attempt)
    assert sorted(losses) == [4, 5, 6]
    assert {iteration: expected[iteration] for iteration in losses} == losses
    assert differing(tensors(where / "whole", 6), tensors(where / name, 6)) == []
    await_no_agent(where)


@pytest.mark.parametrize("name", RESTARTS)
def test_a_restart_is_bit_exact(whole: tuple[Path, Result], name: str) -> None:
    env, source = RESTARTS[name]
    result = run(whole[0], name, max_restarts=1, env=env)
    assert f"iteration 3 was restored from {source}" in result.log
    assert_continues_as(whole, name, result, 1)


def test_rank_0_logs_once_the_drawback_of_one_slot(whole: tuple[Path, Result]) -> None:
    line = (
        "flashckpt: slots: 1: a save begins when the previous one is committed or has failed; a "
        "crash during its copies into host memory resumes from storage"
    )
    assert whole[1].log.count(line) == 1
    assert "flashckpt: host memory: 1 slot of " in whole[1].log
