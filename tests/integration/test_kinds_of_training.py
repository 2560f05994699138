"""Kinds of training that Megatron's flags select resume bit for bit, and train as with stock.

As in `test_flags.py`, stock and we run in turn in one process per rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.flag_runs import (
    DIST,
    EVERY_2,
    TORCH,
    Job,
    Runs,
    assert_equal_ends,
    assert_nothing_lost,
    resumed,
    run_jobs,
)
from tests.support.megatron_jobs import differing, tensors

_SHARDED = f"{DIST} --use-distributed-optimizer"
_EXPERTS = (
    "--num-layers 2 --num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 64 "
    "--disable-bias-linear --moe-token-dispatcher-type alltoall"
)
_GLOBAL_LOSS = (
    f"{_SHARDED} {_EXPERTS} --moe-layer-freq [0,1] --moe-input-jitter-eps 0.01 "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-z-loss-coeff 0.001"
)
_ATTENTION = (
    f"{_SHARDED} --qk-layernorm --softmax-type learnable --attention-output-gate --add-qkv-bias "
    "--group-query-attention --num-query-groups 1 --position-embedding-type rope"
)
#: These tune stock's own formats.
_TUNING = (
    "--ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure "
    "--dist-ckpt-workers 2 --dist-ckpt-optim-fully-reshardable --verify-integrity"
)
RESUMED = [
    *resumed("tuning", f"{_SHARDED} {_TUNING}"),
    *resumed("global-aux-loss", _GLOBAL_LOSS),
    *resumed("attention", _ATTENTION),
    *resumed("inference-rng-tracker", f"{DIST} --inference-rng-tracker"),
    *resumed("sgd-without-momentum", f"{DIST} --optimizer sgd --sgd-momentum 0.0"),
]
_BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
_EP2 = "--expert-model-parallel-size 2"
RESUMED_BY_2 = [
    # Local attention refuses context parallelism, so only the process groups are those of CP2.
    *resumed(
        "context-parallel",
        f"{_SHARDED} --context-parallel-size 2",
        attributes={"context_parallel_size": 1},
    ),
    *resumed("two-instances", f"{_SHARDED} --num-distributed-optimizer-instances 2"),
    *resumed("shared-experts", f"{_SHARDED} {_EXPERTS} {_BIAS} {_EP2}"),
    *resumed("dist-muon", f"{DIST} --num-layers 2 --optimizer dist_muon", stand_in="emerging"),
    *resumed("dist-muon-experts", f"{DIST} {_EXPERTS} --optimizer dist_muon", stand_in="emerging"),
    *resumed(
        "dist-muon-ep2", f"{DIST} {_EXPERTS} {_EP2} --optimizer dist_muon", stand_in="emerging"
    ),
]
#: Stock does not resume these jobs.
STOCK_FAILS = ("sgd-without-momentum",)
_RAMPUP = (
    "--bf16 --ckpt-format torch_dist --train-samples 24 --rampup-batch-size 2 2 8 "
    "--lr-decay-samples 400 --lr-warmup-samples 8"
)
_SAMPLES: dict[str, Any] = {"drop": ["--lr-decay-iters", "--lr-warmup-iters"]}
_SKIP = f"{DIST} --train-iters 6 --iterations-to-skip 3 {EVERY_2}"
ALIKE = [
    # Megatron saves iteration 4 once more, when the batch grows.
    Job("rampup", f"{_RAMPUP} {EVERY_2}", options=_SAMPLES),
    Job("rampup-2", f"{_RAMPUP} {EVERY_2} --load {{save}}", ("rampup", 4), options=_SAMPLES),
    Job("skip", _SKIP),
    Job("skip-2", f"{_SKIP} --load {{save}}", ("skip", 2)),
    Job("exit-and-save", f"{TORCH} --save {{save}} --save-interval 3 --exit-interval 3"),
    Job(
        "data-loader",
        f"{TORCH} {EVERY_2}",
        options={"stand_in": "saving_loader", "attributes": {"dataloader_save": "{save}"}},
    ),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_jobs(tmp_path_factory.mktemp("one"), [*RESUMED, *ALIKE], ranks=1, torchrun=False)


@pytest.fixture(scope="module")
def runs_by_2(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_jobs(tmp_path_factory.mktemp("two"), RESUMED_BY_2, ranks=2, torchrun=False)


@pytest.mark.parametrize("job", RESUMED[::2], ids=lambda job: job.name)
def test_one_rank_resumes_bit_for_bit(runs: Runs, job: Job) -> None:
    assert_nothing_lost(runs, job.name)
    assert_equal_ends(runs, job.name)
    if job.name in STOCK_FAILS:
        assert runs[f"{job.name}-2"]["stock"].ended != "end", "stock resumes: compare it"
    else:
        assert_equal_ends(runs, f"{job.name}-2")


@pytest.mark.parametrize("job", RESUMED_BY_2[::2], ids=lambda job: job.name)
def test_two_ranks_resume_bit_for_bit(runs_by_2: Runs, job: Job) -> None:
    assert_nothing_lost(runs_by_2, job.name)
    assert_equal_ends(runs_by_2, job.name)
    assert_equal_ends(runs_by_2, f"{job.name}-2")


@pytest.mark.parametrize("job", ALIKE, ids=lambda job: job.name)
def test_a_job_ends_as_in_stock(runs: Runs, job: Job) -> None:
    assert runs[job.name]["ours"].ended in ("end", ["exit", 0])
    assert_equal_ends(runs, job.name)


@pytest.mark.parametrize(("name", "last"), [("rampup", 8), ("skip", 6)])
def test_the_position_in_the_data_is_kept(runs: Runs, name: str, last: int) -> None:
    whole, later = runs[name]["ours"], runs[f"{name}-2"]["ours"]
    resumed_at = later.iteration
    assert later.losses == [loss for loss in whole.losses if loss[0] > resumed_at]
    assert differing(tensors(whole.save, last), tensors(later.save, last)) == []


def test_the_state_of_a_data_loader_is_where_stock_saves_it(runs: Runs) -> None:
    def files(save: Path) -> list[str]:
        return sorted(str(file.relative_to(save)) for file in save.rglob("train_dataloader*"))

    ours, stock = (files(runs["data-loader"][entry].save) for entry in ("ours", "stock"))
    assert ours == stock
    assert "iter_0000004/mp_rank_00/train_dataloader_dprank000.pt" in ours
