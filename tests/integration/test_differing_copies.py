"""Replicated tensors whose copies drift apart: each copy is saved, so resuming is bit-exact.

Real jobs of gated delta nets on tensor ranks with dropout, which save at 2, 4 and 6. The copies of
`out_norm` differ from the first step on; those of other norms stay equal. Every save has all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.readers.flashckpt import open_ours
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.megatron_jobs import (
    Result,
    assemble,
    copies,
    differing,
    run_job,
    succeeded,
    tensors,
    truncated_copy,
)

KEYS = {f"decoder.layers.self_attention.out_norm.{name}" for name in ("weight", "bias")}
MODEL = ["--num-layers", "2", "--bf16", "--global-batch-size", "4"]
TP2 = ["--tensor-model-parallel-size", "2"]
KINDS = {"weight", "master", "exp_avg", "exp_avg_sq"}


def job(
    tmp_path: Path, name: str, load: Path, *more: str, model: str = "DELTA_NET", **options: object
) -> Result:
    schedule = ["--train-iters", "6", "--save-interval", "2", "--load", str(load)]
    options = {"ranks": 2, **options, "env": {model: "1", **options.get("env", {})}}
    arguments = [*MODEL, *schedule, "--save", str(load), *more]
    return succeeded(run_job(tmp_path, name, arguments, **options))


class Jobs:
    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.whole, self.killed, self.resumed = (tmp_path / name for name in "ABC")
        distributed = [*TP2, "--use-distributed-optimizer"]
        self.a = job(tmp_path, "a", self.whole, *distributed)
        killed = {"env": {"KILL": "1:6", "FLASHCKPT_WEIGHTS": "derive"}, "max_restarts": 1}
        self.b = job(tmp_path, "b", self.killed, *distributed, **killed)
        truncated_copy(self.whole, self.resumed, 2)
        self.c = job(tmp_path, "c", self.resumed, *distributed)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


def test_every_save_has_the_copies_of_all_ranks(jobs: Jobs) -> None:
    for iteration in (2, 4, 6):
        wholes, own = assemble(jobs.whole, iteration), copies(jobs.whole, iteration)
        assert {(f"{kind}@0.1", key) for kind in KINDS for key in KEYS} <= own.keys()
        differ = {
            key
            for (kind, key), tensor in own.items()
            if not torch.equal(tensor, wholes[kind.partition("@")[0], key])
        }
        assert differ == KEYS
    derived = {kind for kind, key in copies(jobs.killed, 6) if key in KEYS}
    assert derived == {f"{kind}@0.1" for kind in KINDS - {"weight"}}
    assert sorted(event["rank"] for event in jobs.a.named("slab")) == [0, 1], "it has room for them"
    assert [save["calls"] for save in jobs.a.named("save")] == [[]] * 2 * 3


def test_restart_from_memory_is_bit_exact(jobs: Jobs) -> None:
    assert "iteration 4 was restored from memory" in jobs.b.log
    after, expected = jobs.b.losses(1), jobs.a.losses()
    assert after == {iteration: expected[iteration] for iteration in (5, 6)}
    whole, resumed = tensors(jobs.whole, 6), tensors(jobs.killed, 6)
    assert differing({name: whole[name] for name in resumed}, resumed) == []


def test_resume_from_the_first_checkpoint_is_bit_exact(jobs: Jobs) -> None:
    assert "iteration 2 was restored from storage" in jobs.c.log
    after, expected = jobs.c.losses(), jobs.a.losses()
    assert after == {iteration: expected[iteration] for iteration in (3, 4, 5, 6)}
    assert differing(tensors(jobs.whole, 4), tensors(jobs.resumed, 4)) == []
    assert differing(tensors(jobs.whole, 6), tensors(jobs.resumed, 6)) == []


def test_another_tensor_parallel_size_gets_the_main_copies(jobs: Jobs) -> None:
    other = jobs.tmp_path / "other"
    # The job ends at the iteration that it loads, which it has not saved itself.
    ends = ["--tensor-model-parallel-size", "4", "--save", str(other), "--save-interval", "4"]
    job(jobs.tmp_path, "other", jobs.whole, *ends, ranks=4)
    expected, loaded = assemble(jobs.whole, 6), assemble(other, 6)
    assert {name for name in expected if not torch.equal(loaded[name], expected[name])} == set()
    own = copies(other, 6)
    assert {kind for kind, key in own if key in KEYS} == {
        f"{kind}@0.{rank}" for kind in KINDS for rank in (1, 2, 3)
    }
    for (kind, key), tensor in own.items():
        assert torch.equal(tensor, expected[kind.partition("@")[0], key])


def test_tools_verify_and_list_copies_and_convert_the_main_ones(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--all", str(jobs.whole)]) == 0
    assert main(["inspect", str(jobs.whole), "--json"]) == 0
    output = capsys.readouterr().out
    assert all(key in output for key in KEYS)
    converted = open_ours(PosixStore(jobs.whole), 6, Options())
    assert {tensor.kind for tensor in converted.tensors} == KINDS


def test_replicas_that_share_a_copy_resume_from_the_first_save(tmp_path: Path) -> None:
    """Replicas hold equal state of the plain optimizer, and each replica saves a part of it."""
    save = tmp_path / "save"
    killed = {"env": {"KILL": "1:4 1:6"}, "max_restarts": 2}
    result = job(tmp_path, "plain", save, *TP2, ranks=4, **killed)
    assert "iteration 2 was restored from memory" in result.log
    assert "iteration 4 was restored from memory" in result.log
    first, second, third = (result.losses(attempt) for attempt in range(3))
    assert second[3] == first[3]
    assert third[5] == second[5]


def test_a_stage_saves_its_copy_of_an_embedding_that_megatron_lets_drift(tmp_path: Path) -> None:
    """Multi-token prediction on a stage of its own: two later stages hold the tied embedding."""
    stages = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|t|m|L"
    model = f"{stages} --mtp-num-layers 1 --position-embedding-type rope".split()

    def run(name: str, save: Path) -> Result:
        where = ["--save", str(save), "--load", str(save), "--save-interval", "2"]
        arguments = [*MODEL, *model, "--train-iters", "6", *where]
        return succeeded(run_job(tmp_path, name, arguments, ranks=4, env={"MTP": "1"}))

    save, resumed = tmp_path / "A", tmp_path / "C"
    whole = run("a", save)
    stage = {kind for kind, key in copies(save, 6) if key == "embedding.word_embeddings.weight"}
    assert stage == {f"{kind}@1.0" for kind in KINDS}, "the last stage's copy stays equal"
    after = run("c", truncated_copy(save, resumed, 2))
    expected = whole.losses()
    assert after.losses() == {iteration: expected[iteration] for iteration in (3, 4, 5, 6)}
    assert differing(tensors(save, 6), tensors(resumed, 6)) == []


def test_experts_that_tensor_ranks_copy_resume_bit_for_bit(tmp_path: Path) -> None:
    """With TP2, expert TP1 and EP1 Megatron reduces no gradients between copies of an expert."""
    whole, resumed = tmp_path / "A", tmp_path / "B"
    experts = [
        *(*TP2, "--sequence-parallel", "--use-distributed-optimizer", "--disable-bias-linear"),
        *("--num-experts", "4", "--moe-router-topk", "2", "--expert-tensor-parallel-size", "1"),
        *("--moe-token-dispatcher-type", "alltoall"),
    ]
    a = job(tmp_path, "a", whole, *experts, model="MTP")
    copied = {key for _, key in copies(whole, 2) if ".experts." in key}
    assert copied >= {f"decoder.layers.mlp.experts.experts.linear_fc{n}.weight" for n in (1, 2)}
    truncated_copy(whole, resumed, 2)
    b = job(tmp_path, "b", resumed, *experts, model="MTP")
    assert b.losses() == {iteration: a.losses()[iteration] for iteration in (3, 4, 5, 6)}
    assert differing(tensors(whole, 6), tensors(resumed, 6)) == []
