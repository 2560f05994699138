"""Conversion of torch_dist to our format and back, with training in real Megatron.

Three real jobs of two ranks run; `test_more_models.py` has other models. Stock trains 6 iterations
and saves at 2, 4 and 6. Our job resumes from its converted iteration 2, trains to iteration 6 and
saves at 4. Stock resumes from that checkpoint, converted back. All losses, and all global tensors
at iteration 6, must equal those of the first job bit for bit. Dropout is on, so random states are
checked too.

Megatron's `fully_reshardable` is correct only with one bucket, as in these jobs. A job with several
buckets shows that the damage is detected.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.damage_check import masters_that_differ
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from megatron_flashckpt.errors import CorruptCheckpointError
from tests.convert.made import differing
from tests.support.megatron_jobs import DECOUPLED, GROUP_MARKS, Result, run_job, succeeded

DISTRIBUTED = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
MODEL = [
    *("--num-layers", "2", "--bf16", "--swiglu", *DISTRIBUTED),
    *("--untie-embeddings-and-output-weights", *DECOUPLED),
]


def schedule(load: Path, save: Path, iterations: int = 6) -> list[str]:
    return [
        *("--train-iters", str(iterations), "--save", str(save), "--load", str(load)),
        *("--save-interval", "2", "--ckpt-format", "torch_dist"),
    ]


def opened(root: Path, iteration: int) -> Contents:
    return open_source(root, iteration, Options()).contents


class Jobs:
    """The three jobs, and the conversions between them."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        stock, ours, back = (tmp_path / name for name in ("stock", "ours", "back"))
        self.a = self._run("a", [*MODEL, *schedule(stock, stock)], "stock")
        convert(open_source(stock, 2, Options()), ours, "flashckpt", Options())
        self.b = self._run("b", [*MODEL, *schedule(ours, ours)], "launch")
        convert(open_source(ours, 4, Options()), back, "torch_dist", Options())
        self.c = self._run("c", [*MODEL, *schedule(back, back)], "stock")

    def _run(self, name: str, arguments: list[str], entry_point: str) -> Result:
        return run(self.tmp_path, name, arguments, entry_point)


def run(tmp_path: Path, name: str, arguments: list[str], entry_point: str) -> Result:
    env = GROUP_MARKS if entry_point == "stock" else {}
    job = run_job(
        tmp_path, name, arguments, ranks=2, entry_point=entry_point, env=env, timeout_s=400
    )
    return succeeded(job)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


def test_our_job_continues_bit_for_bit_from_megatrons_checkpoint(jobs: Jobs) -> None:
    assert "iteration 2 was restored from storage" in jobs.b.log
    assert sorted(jobs.b.losses()) == [3, 4, 5, 6]
    for iteration, losses in jobs.b.losses().items():
        assert losses == jobs.a.losses()[iteration]
    stock, ours = opened(jobs.tmp_path / "stock", 6), opened(jobs.tmp_path / "ours", 6)
    assert len(stock.tensors) > 40
    assert differing(stock.tensors, ours.tensors) == []


def test_megatron_continues_bit_for_bit_from_our_checkpoint(jobs: Jobs) -> None:
    assert sorted(jobs.c.losses()) == [5, 6]
    for iteration, losses in jobs.c.losses().items():
        assert losses == jobs.a.losses()[iteration]
    stock, back = opened(jobs.tmp_path / "stock", 6), opened(jobs.tmp_path / "back", 6)
    assert differing(stock.tensors, back.tensors) == []


def test_side_state_is_equal_in_all_three_checkpoints(jobs: Jobs) -> None:
    stock = opened(jobs.tmp_path / "stock", 6)
    for name in ("ours", "back"):
        other = opened(jobs.tmp_path / name, 6)
        assert other.common["opt_param_scheduler"] == stock.common["opt_param_scheduler"]
        assert other.args.consumed_train_samples == stock.args.consumed_train_samples == 48
        assert groups(other) == groups(stock)
    assert len(groups(stock)) >= 3


def groups(contents: Contents) -> list[dict]:
    return [group for entry in contents.optimizer for group in entry["param_groups"]]


@pytest.mark.second_tier
def test_megatron_loads_our_checkpoint_at_another_tensor_parallel_size(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """At TP 1, stock trains from the converted TP 2 save as our job does from the original."""
    tmp_path = tmp_path_factory.mktemp("cross")
    ours, dist = tmp_path / "ours", tmp_path / "dist"
    ways = ["--tensor-model-parallel-size", "2"]
    run(tmp_path, "save", [*MODEL, *ways, *schedule(ours, ours, 2)], "launch")
    convert(open_source(ours, 2, Options()), dist, "torch_dist", Options())
    changed = [
        "--override-opt_param-scheduler",
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0",
    ]
    results = {}
    for name, load, entry_point in (("mine", ours, "launch"), ("stock", dist, "stock")):
        job = [*MODEL, *schedule(load, tmp_path / f"saved-{name}", 4), *changed]
        results[name] = run(tmp_path, name, job, entry_point)
    assert sorted(results["stock"].losses()) == [3, 4]
    assert results["stock"].losses() == results["mine"].losses()
    ours_saved, stock = (opened(tmp_path / f"saved-{name}", 4) for name in ("mine", "stock"))
    assert differing(ours_saved.tensors, stock.tensors) == []
    assert groups(ours_saved) == groups(stock)


@pytest.mark.second_tier
def test_state_that_megatron_damages_with_several_buckets_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tmp_path = tmp_path_factory.mktemp("damage")
    arguments = ["--num-layers", "2", "--bf16", *DISTRIBUTED, "--overlap-grad-reduce"]
    # With a hidden size of 72, Megatron pads the ends of buckets.
    arguments += ["--ddp-bucket-size", "20000", "--hidden-size", "72", "--kv-channels", "18"]
    job = [*arguments, *schedule(tmp_path / "stock", tmp_path / "stock", 2)]
    run(tmp_path, "stock", job, "stock")
    source = open_source(tmp_path / "stock", 2, Options())
    wrong = masters_that_differ(source.contents)
    assert len(wrong) > 10
    with pytest.raises(CorruptCheckpointError, match=r"fp32 masters of .* tensors are not"):
        convert(source, tmp_path / "ours", "flashckpt", Options())
    assert not (tmp_path / "ours").exists()
    options = Options(weights_only=True)
    convert(open_source(tmp_path / "stock", 2, options), tmp_path / "ours", "flashckpt", options)
    weights = [tensor for tensor in source.contents.tensors if tensor.kind in ("weight", "buffer")]
    assert differing(weights, opened(tmp_path / "ours", 2).tensors) == []
