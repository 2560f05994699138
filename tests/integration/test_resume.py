"""Interrupted and resumed training equals uninterrupted training, bit for bit, in every layout.

Each layout has three real jobs with dropout. A trains 6 iterations and saves at 3 and 6. In B one
rank is killed (SIGKILL) in iteration 5, and all ranks restart: B must resume from the memory of
iteration 3. C starts from A's directory as it was at iteration 3 and must resume from storage.
`test_launch_scripts.py` has a restart by torchrun itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.megatron_lm.size_estimate import SIDE_NBYTES
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.megatron_jobs import (
    Result,
    await_no_agent,
    differing,
    run_job,
    succeeded,
    tensors,
    truncated_copy,
)
from tests.tiers import only_first

DISTRIBUTED = ["--use-distributed-optimizer"]
LAYOUTS = {
    "tp2dp2-overlap-tied": [
        *("--num-layers", "4", "--bf16", "--tensor-model-parallel-size", "2", *DISTRIBUTED),
        *("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000"),
    ],
    "dp4-fp32-two-writers": ["--num-layers", "2"],
    "pp4-vpp2-untied": [
        *("--num-layers", "8", "--bf16", "--pipeline-model-parallel-size", "4", *DISTRIBUTED),
        *("--num-layers-per-virtual-pipeline-stage", "1", "--no-overlap-p2p-communication"),
        "--untie-embeddings-and-output-weights",
    ],
    "moe-tp2-ep2": [
        *("--num-layers", "2", "--bf16", "--tensor-model-parallel-size", "2", *DISTRIBUTED),
        *("--sequence-parallel", "--expert-model-parallel-size", "2"),
        *("--expert-tensor-parallel-size", "1", "--num-experts", "4", "--moe-router-topk", "2"),
        *("--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear", "--swiglu"),
        *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    ],
}


#: Our settings.
TWO = {"FLASHCKPT_REPLICATED__WEIGHT": "2", "FLASHCKPT_REPLICATED__OPTIMIZER": "2"}
SETTINGS: dict[str, dict[str, str]] = {"dp4-fp32-two-writers": TWO}

#: Layouts in which every rank holds all state that it needs: a load exchanges no tensor bytes.
WITHOUT_REPLICAS = ("pp4-vpp2-untied",)

#: Upper bounds of the number of `torch.distributed` calls in a load, the checks and agreements
#: before training included; docs/how-to/resharding.md states them.
NOTHING_TO_LOAD, FROM_STORAGE, FROM_MEMORY = 14, 22, 24
#: Calls that an exchange between replicas adds.
WITH_REPLICAS = 3


def schedule(save: Path) -> list[str]:
    return [
        *("--train-iters", "6", "--save", str(save), "--load", str(save)),
        *("--save-interval", "3"),
    ]


class Jobs:
    """The three jobs of one layout, each run once."""

    def __init__(self, tmp_path: Path, name: str) -> None:
        self.tmp_path = tmp_path
        self.name = name
        arguments, env = LAYOUTS[name], SETTINGS.get(name, {})

        def run(job: str, **kwargs: Any) -> Result:
            where = [*arguments, *schedule(tmp_path / job.upper())]
            kwargs["env"] = {**env, **kwargs.get("env", {})}
            return succeeded(run_job(tmp_path, job, where, **kwargs))

        self.a = run("a")
        truncated_copy(tmp_path / "A", tmp_path / "C", 3)
        self.b = run("b", max_restarts=1, env={"KILL": "1:5"})
        self.c = run("c")


@pytest.fixture(scope="module", params=only_first(LAYOUTS))
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp(request.param), request.param)


def load_calls(result: Result, attempt: int = 0) -> int:
    """Return the number of `torch.distributed` calls that every rank made in its load.

    Point-to-point messages do not count: ranks that exchange tensors have different peers.
    """
    (number,) = {
        sum(
            call.startswith("c10d.") and not call.startswith(("c10d.send", "c10d.recv"))
            for call in event["calls"]
        )
        for event in result.named("load", attempt)
    }
    return number


def assert_same_losses(whole: Result, resumed: Result, attempt: int) -> None:
    expected, resumed_losses = whole.losses(), resumed.losses(attempt)
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    assert sorted(resumed_losses) == [4, 5, 6]
    for iteration, losses in resumed_losses.items():
        assert losses == expected[iteration], f"losses of iteration {iteration} differ"


def test_resume_from_storage_is_bit_exact(jobs: Jobs) -> None:
    assert "iteration 3 was restored from storage" in jobs.c.log
    assert_same_losses(jobs.a, jobs.c, 0)
    whole, resumed = tensors(jobs.tmp_path / "A", 6), tensors(jobs.tmp_path / "C", 6)
    assert differing(whole, resumed) == []


def test_restart_from_memory_is_bit_exact(jobs: Jobs) -> None:
    assert "iteration 3 was restored from memory" in jobs.b.log
    assert_same_losses(jobs.a, jobs.b, 1)
    whole, resumed = tensors(jobs.tmp_path / "A", 6), tensors(jobs.tmp_path / "B", 6)
    assert differing(whole, resumed) == []


def test_a_restart_from_memory_reads_nothing_from_storage(jobs: Jobs) -> None:
    def read(result: Result, attempt: int) -> list[int]:
        return [event["read_nbytes"] for event in result.named("load", attempt)]

    assert read(jobs.b, attempt=1) == [0] * 4
    assert all(read(jobs.c, attempt=0)), "in a resume from storage, all ranks read"


def test_no_save_communicates(jobs: Jobs) -> None:
    saves = jobs.a.named("save") + jobs.b.named("save") + jobs.c.named("save")
    assert len(saves) == 4 * (2 + 2 + 1)
    assert [save for save in saves if save["calls"]] == []


def test_a_load_makes_few_calls_under_every_layout(jobs: Jobs) -> None:
    """The bound is independent of the number of templates: 2 to 4 in these layouts."""
    nodes = 1 if jobs.name in SETTINGS else 0
    exchange = nodes if jobs.name in WITHOUT_REPLICAS else nodes + WITH_REPLICAS
    assert load_calls(jobs.a, attempt=0) <= NOTHING_TO_LOAD + nodes
    assert load_calls(jobs.c, attempt=0) <= FROM_STORAGE + exchange
    assert load_calls(jobs.b, attempt=1) <= FROM_MEMORY + exchange


def test_a_rank_makes_one_slab_outside_any_save(jobs: Jobs) -> None:
    """One slab also suffices if the first step moves stored state from one replica to another."""
    for result in (jobs.a, jobs.b, jobs.c):
        made = result.named("slab")
        assert sorted(event["rank"] for event in made) == [0, 1, 2, 3]
        assert {event["thread"] for event in made} == {"flashckpt-prepare"}


def test_the_size_expected_before_the_first_step_equals_the_saved_one(jobs: Jobs) -> None:
    saved = dict.fromkeys(range(4), SIDE_NBYTES)
    for (rank, name), tensor in tensors(jobs.tmp_path / "A", 6).items():
        if not name.startswith("rank_state/"):
            saved[rank] += tensor.nbytes
    for result in (jobs.a, jobs.c):  # C resumes from storage
        expected = {event["rank"]: event["data_nbytes"] for event in result.named("slab")}
        assert expected == saved


def test_plans_are_computed_once_per_template_then_shared_and_cached(jobs: Jobs) -> None:
    """All ranks together have one miss per template, before the first save; restarts have none.

    In most of these layouts every rank has its own template; `test_plans.py` has other layouts.
    """
    templates = open_checkpoint(PosixStore(jobs.tmp_path / "A"), 6).manifest.templates
    plans = jobs.a.named("plans")
    assert len(plans) == 4
    assert sum(plan["misses"] for plan in plans) == len(templates)
    assert sum(plan["misses"] + plan["shared"] for plan in plans) == 4
    assert [plan["local"] for plan in plans] == [2, 2, 2, 2], "both saves find the dry run's plan"
    restarted = jobs.b.named("plans", attempt=1)
    assert [(plan["misses"], plan["shared"]) for plan in restarted] == [(0, 1)] * 4


def test_every_job_ends_without_an_agent_and_with_the_last_save_committed(jobs: Jobs) -> None:
    for name, log in (("A", jobs.a.log), ("B", jobs.b.log), ("C", jobs.c.log)):
        tracker = jobs.tmp_path / name / "latest_checkpointed_iteration.txt"
        assert tracker.read_text() == "6"
        assert log.count("successfully saved checkpoint from iteration       6") == 1
    await_no_agent(jobs.tmp_path)
