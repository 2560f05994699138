"""`weights: derive`: a save leaves out 16-bit weights, and a load makes them from their masters.

Real jobs on two ranks with dropout. One job stores its weights, the others do not. They are killed,
restarted from memory, resumed from storage, and loaded under another layout.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.readers.flashckpt import open_ours
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.megatron_jobs import (
    Result,
    assemble,
    differing,
    run_job,
    succeeded,
    tensors,
    truncated_copy,
)

MODEL = ["--num-layers", "2", "--bf16", "--swiglu", "--untie-embeddings-and-output-weights"]
# After a step with an overlapped all-gather, weights are older than their masters.
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
DERIVE = {"FLASHCKPT_WEIGHTS": "derive"}


def job(tmp_path: Path, name: str, load: Path, save: Path, *more: str, **options: object) -> Result:
    schedule = ["--train-iters", "6", "--save-interval", "3", "--load", str(load)]
    arguments = [*MODEL, *DISTRIBUTED, *schedule, "--save", str(save), *more]
    return succeeded(run_job(tmp_path, name, arguments, ranks=2, **options))


class Jobs:
    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.stored, self.derived, self.resumed = (tmp_path / name for name in "ABC")
        self.a = job(tmp_path, "a", self.stored, self.stored)
        killed = {"env": {"KILL": "1:5", **DERIVE}, "max_restarts": 1}
        self.b = job(tmp_path, "b", self.derived, self.derived, **killed)
        truncated_copy(self.derived, self.resumed, 3)
        self.c = job(tmp_path, "c", self.resumed, self.resumed)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


def test_no_weight_that_has_a_master_is_saved(jobs: Jobs) -> None:
    stored, derived = tensors(jobs.stored, 6), tensors(jobs.derived, 6)
    weights = {name for name in stored if name[1].startswith("weight/")}
    assert len(weights) > 10
    assert differing({name: stored[name] for name in stored.keys() - weights}, derived) == []
    assert derived.keys() == stored.keys() - weights, "every weight of this model is bfloat16"


def test_restart_from_memory_is_bit_exact(jobs: Jobs) -> None:
    assert "iteration 3 was restored from memory" in jobs.b.log
    after = jobs.b.losses(1)
    assert sorted(after) == [4, 5, 6]
    assert after == {iteration: jobs.a.losses()[iteration] for iteration in after}


def test_resume_from_storage_is_bit_exact_weights_included(jobs: Jobs) -> None:
    assert "iteration 3 was restored from storage" in jobs.c.log
    after = jobs.c.losses()
    assert sorted(after) == [4, 5, 6]
    assert after == {iteration: jobs.a.losses()[iteration] for iteration in after}
    assert differing(tensors(jobs.stored, 6), tensors(jobs.resumed, 6)) == []


def test_weights_are_derived_under_another_layout_and_without_the_optimizer(jobs: Jobs) -> None:
    expected = assemble(jobs.stored, 6)
    weights = {name: tensor for name, tensor in expected.items() if name[0] == "weight"}
    split = jobs.tmp_path / "split"
    # The job ends at the iteration that it loads, which it has not saved itself.
    end = ["--tensor-model-parallel-size", "2", "--save-interval", "4"]
    job(jobs.tmp_path, "split", jobs.derived, split, *end)
    result = assemble(split, 6)
    assert {name for name in expected if not torch.equal(result[name], expected[name])} == set()
    alone = jobs.tmp_path / "alone"
    job(jobs.tmp_path, "alone", jobs.derived, alone, *end, "--no-load-optim")
    result = assemble(alone, 6)
    assert {name for name in weights if not torch.equal(result[name], weights[name])} == set()


def test_tools_derive_the_weights(jobs: Jobs) -> None:
    store = PosixStore(jobs.derived)
    assert verify(open_checkpoint(store, 6)) == []
    expected = assemble(jobs.stored, 6)
    derived = {
        (source.kind, source.key): source for source in open_ours(store, 6, Options()).tensors
    }
    assert derived.keys() == expected.keys()
    for name, tensor in derived.items():
        whole = ((0,) * len(tensor.shape), tensor.shape)
        assert torch.equal(tensor.read(whole), expected[name]), name


def test_derive_is_refused_without_an_optimizer_that_shards_its_state(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "save"), "--save-interval", "1", "--train-iters", "1"]
    model = ["--num-layers", "1", "--bf16"]
    result = run_job(tmp_path, "plain", [*model, *save], ranks=1, env=DERIVE)
    assert result.returncode != 0
    assert "'weights: derive', but no optimizer that shards its state steps: " in result.log
    assert "embedding.word_embeddings.weight" in result.log
    assert "set 'weights: store', the default; or train every 16-bit weight with" in result.log
    assert result.events == [], "a loss was computed, or a save was made"
