"""Conversion of stock's `torch_dist` with its default optimizer format, which has no names.

Each layout runs two real jobs with dropout. Job A is stock Megatron, `--ckpt-format torch_dist`; it
trains 4 iterations and saves every second. Job B is ours; it resumes from A's converted iteration
2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from megatron_flashckpt.convert.readers import dp_reshardable
from megatron_flashckpt.convert.readers.dcp import Reader
from megatron_flashckpt.errors import CorruptCheckpointError
from tests.convert.tensors import assert_equal, wholes
from tests.support.megatron_jobs import DECOUPLED, MUP, Result, assemble, run_job, succeeded

LAYOUTS = {
    # Stages differ: both have a bucket for the embedding, and the first stage has more buckets.
    "pp2-tied-swiglu-buckets": [
        *("--num-layers", "4", "--bf16", "--pipeline-model-parallel-size", "2", "--swiglu"),
        *("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000"),
        *DECOUPLED,
    ],
    "moe-ep2": [
        *("--num-layers", "2", "--bf16", "--expert-model-parallel-size", "2"),
        *("--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"),
        *("--moe-token-dispatcher-type", "alltoall", *DECOUPLED, *MUP),
    ],
}


class Jobs:
    """The two jobs of one layout; each runs once."""

    def __init__(self, tmp_path: Path, arguments: list[str]) -> None:
        self.tmp_path = tmp_path
        self.a = self._run("a", [*arguments, "--ckpt-format", "torch_dist"], "stock")
        opened = open_source(tmp_path / "A", 2, Options())
        convert(opened, tmp_path / "B", "flashckpt", Options())
        self.b = self._run("b", arguments, "launch")

    def _run(self, name: str, arguments: list[str], entry_point: str) -> Result:
        save = str(self.tmp_path / name.upper())
        job = [
            *(*arguments, "--use-distributed-optimizer", "--train-iters", "4"),
            *("--save", save, "--load", save, "--save-interval", "2"),
        ]
        return succeeded(run_job(self.tmp_path, name, job, ranks=2, entry_point=entry_point))


@pytest.fixture(scope="module", params=LAYOUTS, ids=list(LAYOUTS))
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp(request.param), LAYOUTS[request.param])


def test_training_continues_with_equal_losses_after_a_conversion(jobs: Jobs) -> None:
    expected = jobs.a.losses()
    assert sorted(expected) == [1, 2, 3, 4]
    assert jobs.b.losses() == {n: expected[n] for n in (3, 4)}


def test_our_save_has_the_same_param_groups_as_megatrons_save(jobs: Jobs) -> None:
    stock, ours = (
        open_source(jobs.tmp_path / name, 4, Options()).contents.optimizer for name in "AB"
    )
    groups = [group for entry in stock for group in entry["param_groups"]]
    assert len({(group["max_lr"], group["wd_mult"], group["eps"]) for group in groups}) >= 3
    assert [group for entry in ours for group in entry["param_groups"]] == groups


def test_converted_tensors_equal_those_of_our_own_save(jobs: Jobs) -> None:
    ours = assemble(jobs.tmp_path / "B", 4)
    assert {"weight", "master", "exp_avg", "exp_avg_sq"} == {kind for kind, _ in ours}
    assert_equal(ours, wholes(open_source(jobs.tmp_path / "A", 4, Options()).contents))


def test_a_shifted_bucket_is_refused(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranges are shifted by one element, as by another alignment."""
    real_ranges = dp_reshardable._ranges

    def shifted(reader, name):
        read = real_ranges(reader, name)
        (numel,) = reader.tensors[name].shape
        return lambda start, end: read(min(start + 1, numel - end + start), min(end + 1, numel))

    monkeypatch.setattr(dp_reshardable, "_ranges", shifted)
    with pytest.raises(CorruptCheckpointError, match="differ from the rounded masters"):
        open_source(jobs.tmp_path / "A", 2, Options())


def test_megatrons_default_optimizer_format_names_no_parameter(jobs: Jobs) -> None:
    """Control: only the rebuilt model maps the optimizer's state to parameters."""
    reader = Reader(jobs.tmp_path / "A/iter_0000002")
    of_optimizer = [name for name in reader.tensors if name.startswith(("optimizer.", "chained_"))]
    assert len(of_optimizer) >= 3
    assert all(".bucket_idx_" in name and "weight" not in name for name in of_optimizer)
