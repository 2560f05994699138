"""Replicated tensors whose copies drift apart: each copy is saved, so resuming is bit-exact.

Real jobs of gated delta nets on tensor ranks with dropout, which save at 2, 4 and 6. The first save
detects that the copies of `out_norm` differ and stores only the main copies; later saves store all.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.readers.flashckpt import open_ours
from megatron_flashckpt.storage.posix import PosixStorage
from tests.support.megatron_jobs import (
    Result,
    assemble,
    differing,
    run_job,
    succeeded,
    tensors,
    truncated_copy,
)

KEYS = {f"decoder.layers.self_attention.out_norm.{name}" for name in ("weight", "bias")}
MODEL = ["--num-layers", "2", "--bf16", "--global-batch-size", "4"]
TP2 = ["--tensor-model-parallel-size", "2"]
FOUND = "ranks hold different copies of 2 tensors"
REPLACED = "All ranks now get the first copy of each, because"


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
        truncated_copy(self.whole, self.resumed, 4)
        self.c = job(tmp_path, "c", self.resumed, *distributed)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


def copies(save: Path, iteration: int) -> set[tuple[str, str]]:
    """Return kind and key of all copies that are saved in addition to the main ones."""
    matches = (re.fullmatch("(.*)@0.1/(.*)#.", name) for _, name in tensors(save, iteration))
    return {(match[1], match[2]) for match in matches if match}


def test_the_log_names_differing_copies_once(jobs: Jobs) -> None:
    (message,) = (line for line in jobs.a.log.splitlines() if FOUND in line)
    assert "iteration 2: " in message
    assert all(key in message for key in KEYS)
    assert REPLACED not in jobs.a.log + jobs.b.log + jobs.c.log
    assert FOUND not in jobs.c.log, "the checkpoint already records which copies differ"


def test_only_copies_that_differ_are_saved_from_the_second_save_on(jobs: Jobs) -> None:
    kinds = {"weight", "master", "exp_avg", "exp_avg_sq"}
    expected = {(kind, key) for kind in kinds for key in KEYS}
    assert copies(jobs.whole, 2) == set()
    assert copies(jobs.whole, 4) == copies(jobs.whole, 6) == expected
    derived = {(kind, key) for kind, key in expected if kind != "weight"}
    assert copies(jobs.killed, 6) == derived


def test_no_save_communicates(jobs: Jobs) -> None:
    saves = jobs.a.named("save")
    assert len(saves) == 2 * 3
    assert [save["calls"] for save in saves if save["calls"]] == []


def test_a_rank_makes_one_slab_that_has_room_for_copies(jobs: Jobs) -> None:
    assert sorted(event["rank"] for event in jobs.a.named("slab")) == [0, 1]


def test_restart_from_memory_is_bit_exact(jobs: Jobs) -> None:
    assert "iteration 4 was restored from memory" in jobs.b.log
    after, expected = jobs.b.losses(1), jobs.a.losses()
    assert after == {iteration: expected[iteration] for iteration in (5, 6)}
    whole, resumed = tensors(jobs.whole, 6), tensors(jobs.killed, 6)
    assert differing({name: whole[name] for name in resumed}, resumed) == []


def test_resume_from_storage_is_bit_exact(jobs: Jobs) -> None:
    assert "iteration 4 was restored from storage" in jobs.c.log
    after, expected = jobs.c.losses(), jobs.a.losses()
    assert after == {iteration: expected[iteration] for iteration in (5, 6)}
    assert differing(tensors(jobs.whole, 6), tensors(jobs.resumed, 6)) == []


def test_another_tensor_parallel_size_gets_the_main_copies_and_one_warning(jobs: Jobs) -> None:
    other = jobs.tmp_path / "other"
    # The job ends at the iteration that it loads, which it has not saved itself.
    ends = ["--tensor-model-parallel-size", "4", "--save", str(other), "--save-interval", "4"]
    result = job(jobs.tmp_path, "other", jobs.whole, *ends, ranks=4)
    (warning,) = (line for line in result.log.splitlines() if REPLACED in line)
    assert all(key in warning for key in KEYS)
    assert "the tensor parallel size has changed" in warning
    stored, loaded = assemble(jobs.whole, 6), assemble(other, 6)
    expected = {name: tensor for name, tensor in stored.items() if "@" not in name[0]}
    assert {name for name in expected if not torch.equal(loaded[name], expected[name])} == set()
    copies = {(kind, key) for kind, key in loaded if "@" in kind}
    assert len(copies) == 3 * 4 * len(KEYS), "every copy is saved, as the copies differed before"
    for kind, key in copies:
        assert torch.equal(loaded[kind, key], expected[kind.partition("@")[0], key])


def test_a_job_without_copies_records_no_difference(jobs: Jobs) -> None:
    one = jobs.tmp_path / "one"
    job(jobs.tmp_path, "one", jobs.whole, "--save", str(one), "--save-interval", "4", ranks=1)
    storage = PosixStorage(one)
    manifest = StoredCheckpoint(storage, 6, read_manifest(storage, 6)).manifest
    assert (manifest.world_size, manifest.differing) == (1, ())


def test_tools_verify_and_list_copies_and_convert_the_main_ones(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--all", str(jobs.whole)]) == 0
    assert main(["inspect", str(jobs.whole), "--json"]) == 0
    output = capsys.readouterr().out
    assert all(key in output for key in KEYS)
    storage = PosixStorage(jobs.whole)
    manifest = StoredCheckpoint(storage, 2, read_manifest(storage, 2)).manifest
    assert (set(manifest.differing), manifest.compared) == (KEYS, True)
    converted = open_ours(storage, 6, Options())
    assert [kind for tensor in converted.tensors if "@" in (kind := tensor.kind)] == []
    assert all(key in converted.warnings[0] for key in KEYS)


def test_after_a_restart_from_the_first_save_the_next_has_all_copies(tmp_path: Path) -> None:
    """Replicas hold equal state of the plain optimizer, and each replica saves a part of it."""
    save = tmp_path / "save"
    killed = {"env": {"KILL": "1:4 1:6"}, "max_restarts": 2}
    result = job(tmp_path, "plain", save, *TP2, ranks=4, **killed)
    assert "iteration 2 was restored from memory" in result.log
    (warning,) = (line for line in result.log.splitlines() if REPLACED in line)
    assert "no other copies were saved" in warning
    assert all(key in warning for key in KEYS)
    assert "iteration 4 was restored from memory" in result.log
    before, after = result.losses(1), result.losses(2)
    assert after[5] == before[5]
    assert {key for _, key in copies(save, 4)} == KEYS


def test_stages_with_equally_numbered_copies_save_separate_ones(tmp_path: Path) -> None:
    """Multi-token prediction on a stage of its own: two later stages hold the tied embedding."""
    stages = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|t|m|L"
    model = f"{stages} --mtp-num-layers 1 --position-embedding-type rope".split()

    def run(name: str, save: Path) -> Result:
        where = ["--save", str(save), "--load", str(save), "--save-interval", "2"]
        arguments = [*MODEL, *model, "--train-iters", "6", *where]
        return succeeded(run_job(tmp_path, name, arguments, ranks=4, env={"MTP": "1"}))

    save, resumed = tmp_path / "A", tmp_path / "C"
    whole = run("a", save)
    assert "different copies of 1 tensor (embedding.word_embeddings.weight)" in whole.log
    kinds = {"weight", "master", "exp_avg", "exp_avg_sq"}
    copy_kinds = {kind for kind, _ in assemble(save, 6) if "@" in kind}
    assert copy_kinds == {f"{kind}@{copy}" for kind in kinds for copy in ("1.0", "2.0")}
    after = run("c", truncated_copy(save, resumed, 4))
    assert REPLACED not in after.log
    expected = whole.losses()
    assert after.losses() == {iteration: expected[iteration] for iteration in (5, 6)}
    assert differing(tensors(save, 6), tensors(resumed, 6)) == []


def test_experts_that_tensor_ranks_copy_resume_bit_for_bit(tmp_path: Path) -> None:
    """With TP2, expert TP1 and EP1 Megatron reduces no gradients between copies of an expert."""
    whole, resumed = tmp_path / "A", tmp_path / "B"
    experts = [
        *(*TP2, "--sequence-parallel", "--use-distributed-optimizer", "--disable-bias-linear"),
        *("--num-experts", "4", "--moe-router-topk", "2", "--expert-tensor-parallel-size", "1"),
        *("--moe-token-dispatcher-type", "alltoall"),
    ]
    # Each save waits for the results of earlier saves, also in a job that may predict more tokens.
    a = job(tmp_path, "a", whole, *experts, model="MTP")
    assert FOUND in a.log
    keys = {f"decoder.layers.mlp.experts.experts.linear_fc{n}.weight" for n in (1, 2)}
    assert {key for _, key in copies(whole, 4)} == keys
    truncated_copy(whole, resumed, 4)
    b = job(tmp_path, "b", resumed, *experts, model="MTP")
    assert b.losses() == {iteration: a.losses()[iteration] for iteration in (5, 6)}
    assert differing(tensors(whole, 6), tensors(resumed, 6)) == []


def test_experts_with_more_parallelism_than_dense_replicas_resume(tmp_path: Path) -> None:
    """Four ranks with TP2, expert TP1 and EP4 hold two dense replicas, and one of the experts."""
    whole, resumed = tmp_path / "A", tmp_path / "B"
    experts = [
        *(*TP2, "--sequence-parallel", "--use-distributed-optimizer", "--disable-bias-linear"),
        *("--num-experts", "4", "--moe-router-topk", "2", "--expert-tensor-parallel-size", "1"),
        *("--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size", "4"),
    ]
    a = job(tmp_path, "a", whole, *experts, model="MTP", ranks=4)
    assert FOUND not in a.log
    truncated_copy(whole, resumed, 4)
    b = job(tmp_path, "b", resumed, *experts, model="MTP", ranks=4)
    assert b.losses() == {iteration: a.losses()[iteration] for iteration in (5, 6)}
    assert differing(tensors(whole, 6), tensors(resumed, 6)) == []
