"""A checkpoint is loaded into a model that differs from the saved one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.megatron_jobs import Result, run_job, succeeded

MODEL = ["--num-layers", "2", "--bf16", "--train-iters", "3", "--save-interval", "2"]
HEAD = "weight/output_layer.weight"
UNTIED = "--untie-embeddings-and-output-weights"
ROWS = "embedding.word_embeddings.weight: 512 rows in the checkpoint"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model whose output layer has a weight of its own; 500 words make 512 rows."""
    where = tmp_path_factory.mktemp("models")
    flags = [UNTIED, "--exit-interval", "2"]
    succeeded(run_job(where, "first", [*MODEL, *flags, "--save", str(where / "S")], ranks=1))
    return where


def load(saved: Path, name: str, *flags: str, **env: str) -> Result:
    return run_job(saved, name, [*MODEL, "--load", str(saved / "S"), *flags], ranks=1, env=env)


def test_a_head_is_dropped_with_a_line_to_finetune(saved: Path) -> None:
    log = succeeded(load(saved, "tune", "--finetune")).log
    assert f"unexpected state is not read: {HEAD}" in log


@pytest.mark.parametrize("flags", [[], ["--finetune", "--dist-ckpt-strictness", "raise_all"]])
def test_a_head_is_refused_otherwise_with_the_flag_that_helps(
    saved: Path, flags: list[str]
) -> None:
    refused = load(saved, f"refused{len(flags)}", *flags)
    assert refused.returncode != 0
    assert f"{HEAD}: in the checkpoint, not in the model" in refused.log
    assert "--dist-ckpt-strictness log_all loads what both have" in refused.log


@pytest.mark.parametrize("frozen", ["layers.0", "word_embeddings"])
def test_state_of_parameters_that_are_frozen_now_is_refused_with_the_flag_that_helps(
    saved: Path, frozen: str
) -> None:
    """Layers share a key with others, an embedding has its own: the same act, the same answer."""
    refused = load(saved, f"frozen-{frozen}", UNTIED, FREEZE=frozen)
    assert refused.returncode != 0
    assert re.search(r"  exp_avg/\S+( \(in part\))?: in the checkpoint, not in the mo", refused.log)
    assert "--no-load-optim loads the weights alone" in refused.log
    flags = [UNTIED, "--dist-ckpt-strictness", "log_all"]
    log = succeeded(load(saved, f"lenient-{frozen}", *flags, FREEZE=frozen)).log
    assert re.search(r"unexpected state is not read: exp_avg/", log)
    succeeded(load(saved, f"weights-{frozen}", UNTIED, "--no-load-optim", FREEZE=frozen))


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
def test_weights_alone_are_loaded_into_a_model_of_another_type(saved: Path, flag: str) -> None:
    flags = [UNTIED, "--load", str(saved / "S"), flag]
    model = [flag for flag in MODEL if flag != "--bf16"]
    log = succeeded(run_job(saved, f"fp32{flag}", [*model, *flags], ranks=1)).log
    assert "weights of type BF16 become F32" in log


@pytest.mark.parametrize(("words", "rows"), [(300, 384), (600, 640)])
def test_another_vocabulary_is_refused_except_to_finetune(
    saved: Path, words: int, rows: int
) -> None:
    """Rows of words would be cut off or added; `test_reshard.py` has other padding."""
    flags = [UNTIED, "--vocab-size", str(words)]
    refused = load(saved, f"resume-{words}", *flags)
    assert refused.returncode != 0
    assert f"{ROWS}, {rows} in the model" in refused.log
    tuned = succeeded(load(saved, f"tune-{words}", *flags, "--finetune"))
    assert f"{ROWS}, {rows} in the model" in tuned.log
