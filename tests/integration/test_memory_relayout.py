"""A job that crashed resumes under another parallel layout from the memory of its ranks.

A (TP2 x DP2) dies in iteration 5, and torchrun does not restart it. M (PP2 x DP2) is started by
hand on the same directory: memory holds iteration 3. S is the same job as M, but finds only the
files of iteration 3.
"""

from __future__ import annotations

import pytest

from tests.integration.test_resume import DISTRIBUTED, load_calls, schedule
from tests.support.megatron_jobs import (
    Result,
    await_no_agent,
    differing,
    run_job,
    succeeded,
    tensors,
    truncated_copy,
)

TP2 = ["--num-layers", "4", "--bf16", "--swiglu", "--tensor-model-parallel-size", "2", *DISTRIBUTED]
PP2 = ["--num-layers", "4", "--bf16", "--swiglu", "--pipeline-model-parallel-size", "2"]
PP2 += DISTRIBUTED
PATIENT = {"FLASHCKPT_AGENT__GRACE_S": "120"}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    tmp_path = tmp_path_factory.mktemp("relayout")
    save = tmp_path / "A"
    crashed = run_job(tmp_path, "a", [*TP2, *schedule(save)], env={"KILL": "1:5", **PATIENT})
    assert crashed.returncode != 0
    truncated_copy(save, tmp_path / "S", 3)
    results = {
        "memory": run_job(tmp_path, "m", [*PP2, *schedule(save)]),
        "storage": run_job(tmp_path, "s", [*PP2, *schedule(tmp_path / "S")]),
    }
    for result in results.values():
        succeeded(result)
    await_no_agent(tmp_path)
    assert differing(tensors(save, 6), tensors(tmp_path / "S", 6)) == []
    return results


def test_a_crashed_job_resumes_from_memory_under_another_layout(jobs: dict[str, Result]) -> None:
    assert "iteration 3 was restored from memory" in jobs["memory"].log
    assert "received 0.0 MiB from other ranks" in jobs["memory"].log, "they read each other's slots"
    assert "iteration 3 was restored from storage" in jobs["storage"].log


def test_a_resume_from_memory_trains_like_one_from_storage(jobs: dict[str, Result]) -> None:
    losses = jobs["memory"].losses()
    assert sorted(losses) == [4, 5, 6]
    assert losses == jobs["storage"].losses()


def test_a_load_under_another_layout_makes_few_calls(jobs: dict[str, Result]) -> None:
    assert load_calls(jobs["memory"]) <= 31
    assert load_calls(jobs["storage"]) <= 28
