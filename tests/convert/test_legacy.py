"""Conversion of Megatron's legacy format to ours and back; training continues bit for bit.

Each layout runs real jobs with dropout. Job A is stock Megatron with `--ckpt-format torch`; it
trains 6 iterations and saves every second. Job B is ours; it resumes from A's converted iteration
2. Job C is stock again; it resumes from B's iteration 4, converted back. Experts need no job C,
because the other layouts show that equal files are enough.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch

from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.former_export import MARKER
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from tests.convert.tensors import assert_equal, wholes
from tests.support.megatron_jobs import (
    DECOUPLED,
    GROUP_MARKS,
    MUP,
    Result,
    assemble,
    run_job,
    same,
    succeeded,
)

LAYOUTS = {
    "tp2dp2-swiglu-untied-distributed-buckets": (
        4,
        [
            *("--num-layers", "2", "--bf16", "--tensor-model-parallel-size", "2", "--swiglu"),
            *("--untie-embeddings-and-output-weights", "--use-distributed-optimizer"),
            *("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000"),
            *DECOUPLED,
        ],
    ),
    "pp2-tied-plain-optimizer": (
        2,
        [
            *("--num-layers", "2", "--bf16", "--pipeline-model-parallel-size", "2", "--swiglu"),
            *(*DECOUPLED, *MUP),
        ],
    ),
    "moe-ep2-distributed": (
        2,
        [
            *("--num-layers", "2", "--bf16", "--expert-model-parallel-size", "2"),
            *("--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"),
            *("--moe-token-dispatcher-type", "alltoall", "--use-distributed-optimizer"),
            *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
            *("--untie-embeddings-and-output-weights", *DECOUPLED, *MUP),
        ],
    ),
}


def schedule(save: Path) -> list[str]:
    return [
        *("--train-iters", "6", "--save", str(save), "--load", str(save)),
        *("--save-interval", "2"),
    ]


def converted(source: Path, destination: Path, to: str, iteration: int) -> None:
    options = Options()
    convert(open_source(source, iteration, options), destination, to, options)


class Jobs:
    """The jobs of one layout; each runs once."""

    def __init__(self, tmp_path: Path, ranks: int, arguments: list[str]) -> None:
        self.tmp_path = tmp_path
        self.a = self._run("a", [*arguments, "--ckpt-format", "torch"], ranks, "stock")
        converted(tmp_path / "A", tmp_path / "B", "flashckpt", 2)
        self.b = self._run("b", arguments, ranks, "launch")
        converted(tmp_path / "B", tmp_path / "C", "torch", 4)
        self.c = None
        if "--num-experts" not in arguments:
            self.c = self._run("c", [*arguments, "--ckpt-format", "torch"], ranks, "stock")

    def _run(self, name: str, arguments: list[str], ranks: int, entry_point: str) -> Result:
        save = self.tmp_path / name.upper()
        job = [*arguments, *schedule(save)]
        env = GROUP_MARKS if entry_point == "stock" else {}
        return succeeded(
            run_job(self.tmp_path, name, job, ranks=ranks, entry_point=entry_point, env=env)
        )


@pytest.fixture(scope="module", params=LAYOUTS, ids=list(LAYOUTS))
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    # A short name, because the path of the agent's socket must be short.
    return Jobs(tmp_path_factory.mktemp("legacy"), *LAYOUTS[request.param])


def test_training_continues_bit_for_bit_after_either_conversion(jobs: Jobs) -> None:
    expected = jobs.a.losses()
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    assert jobs.b.losses() == {n: expected[n] for n in (3, 4, 5, 6)}
    assert jobs.c is None or jobs.c.losses() == {n: expected[n] for n in (5, 6)}


def test_our_save_has_the_same_param_groups_as_megatrons_save(jobs: Jobs) -> None:
    stock, ours = (open_source(jobs.tmp_path / name, 6, Options()).contents for name in "AB")
    assert {True, False} == {group["default_config"] for group in stocks_groups(stock)}
    assert stocks_groups(ours) == stocks_groups(stock)


def stocks_groups(contents: Contents) -> list[dict]:
    groups = [group for entry in contents.optimizer or [] for group in entry["param_groups"]]
    assert len(groups) >= 3
    return groups


def test_converted_tensors_equal_those_of_our_own_save(jobs: Jobs) -> None:
    ours = assemble(jobs.tmp_path / "B", 6)
    assert {"weight", "master", "exp_avg", "exp_avg_sq"} <= {kind for kind, _ in ours}
    legacy = open_source(jobs.tmp_path / "A", 6, Options())
    assert legacy.format == "torch"
    assert_equal(ours, wholes(legacy.contents))


def test_our_legacy_files_equal_megatrons_files(jobs: Jobs) -> None:
    """Every entry of every file of the iteration is equal bit for bit."""
    written, stocks = (jobs.tmp_path / name / "iter_0000004" for name in "CA")
    names = sorted(path.relative_to(stocks) for path in stocks.rglob("*.pt"))
    assert names == sorted(
        path.relative_to(written)
        for path in written.rglob("*")
        if path.is_file() and path.name != MARKER
    )
    for name in names:
        ours, expected = (torch.load(d / name, weights_only=False) for d in (written, stocks))
        assert differences(ours, expected, str(name)) == []


#: Args in which the two jobs may differ: those about the start of the job, and about the rank
#: (our format keeps the args of rank 0).
IGNORED = re.compile(
    r".*/args/(save|load|rank|local_rank|iteration|num_floating_point_operations_so_far)"
    # Only legacy files keep this per data-parallel rank; Megatron's other formats have one.
    r"|.*/mp_rank_00_001/.*/rng_tracker_states/expert-parallel-rng"
)


def differences(one: object, other: object, path: str) -> list[str]:
    if isinstance(one, argparse.Namespace) and isinstance(other, argparse.Namespace):
        one, other = vars(one), vars(other)
    if isinstance(one, dict) and isinstance(other, dict):
        paths = [f"{path}/{key}" for key in one.keys() ^ other.keys()]
        for key in one.keys() & other.keys():
            paths += differences(one[key], other[key], f"{path}/{key}")
        return paths
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = zip(one, other, strict=True)
        return [line for n, pair in enumerate(pairs) for line in differences(*pair, f"{path}/{n}")]
    return [] if same(one, other) or IGNORED.fullmatch(f"/{path}") else [path]
