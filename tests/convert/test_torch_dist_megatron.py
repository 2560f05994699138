"""Conversion of torch_dist to our format and back, with training in real Megatron.

Three real jobs of two ranks run; `test_more_models.py` has other models. Stock trains 6 iterations
and saves at 2, 4 and 6. Our job resumes from its converted iteration 2, trains to iteration 6 and
saves at 4. Stock resumes from that checkpoint, converted back. All losses, and all global tensors
at iteration 6, must equal those of the first job bit for bit. Dropout is on, so random states are
checked too. Megatron's `fully_reshardable` is correct only with one bucket, as in these jobs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.convert.common.contents import Contents
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.formats import convert, open_source
from tests.convert.made import differing
from tests.support.megatron_jobs import DECOUPLED, GROUP_MARKS, Result, run_job, succeeded

MODEL = [
    *("--num-layers", "2", "--bf16", "--swiglu", "--use-distributed-optimizer"),
    "--dist-ckpt-optim-fully-reshardable",
    *("--untie-embeddings-and-output-weights", *DECOUPLED),
    *("--train-iters", "6", "--save-interval", "2", "--ckpt-format", "torch_dist"),
]


class Jobs:
    """The three jobs, and the conversions between them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        stock, ours, back = (root / name for name in ("stock", "ours", "back"))
        self.a = self._run("a", stock, "stock")
        convert(open_source(stock, 2, Options()), ours, "flashckpt", Options())
        self.b = self._run("b", ours, "launch")
        convert(open_source(ours, 4, Options()), back, "torch_dist", Options())
        self.c = self._run("c", back, "stock")

    def _run(self, name: str, save: Path, entry_point: str) -> Result:
        flags = [*MODEL, "--load", str(save), "--save", str(save)]
        env = GROUP_MARKS if entry_point == "stock" else {}
        return succeeded(
            run_job(
                *(self.root, name, flags),
                ranks=2,
                entry_point=entry_point,
                env=env,
                timeout_s=400,
            )
        )

    def contents(self, name: str) -> Contents:
        """Return what the job that saves to `name` has saved last."""
        return open_source(self.root / name, 6, Options()).contents


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


@pytest.mark.parametrize(("save", "first"), [("ours", 3), ("back", 5)])
def test_a_job_continues_bit_for_bit_from_a_converted_checkpoint(
    jobs: Jobs, save: str, first: int
) -> None:
    result = jobs.b if save == "ours" else jobs.c
    assert sorted(result.losses()) == list(range(first, 7))
    for iteration, losses in result.losses().items():
        assert losses == jobs.a.losses()[iteration]
    stock, other = jobs.contents("stock"), jobs.contents(save)
    assert len(stock.tensors) > 40
    assert differing(stock.tensors, other.tensors) == []
    assert other.common["opt_param_scheduler"] == stock.common["opt_param_scheduler"]
    assert other.args.consumed_train_samples == stock.args.consumed_train_samples == 48
    assert groups(other) == groups(stock)
    assert len(groups(stock)) >= 3
    assert "iteration 2 was restored from storage" in jobs.b.log


def groups(contents: Contents) -> list[dict]:
    return [group for entry in contents.optimizer for group in entry["param_groups"]]
