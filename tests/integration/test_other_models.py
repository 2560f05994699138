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


def test_a_head_is_refused_with_the_flag_that_helps_and_dropped_to_finetune(saved: Path) -> None:
    refused = load(saved, "refused", "--finetune", "--dist-ckpt-strictness", "raise_all")
    assert refused.returncode != 0
    assert f"{HEAD}: in the checkpoint, not in the model" in refused.log
    assert "--dist-ckpt-strictness log_all loads what both have" in refused.log
    log = succeeded(load(saved, "tune", "--finetune")).log
    assert f"unexpected state is not read: {HEAD}" in log


def test_state_of_parameters_that_are_frozen_now_is_refused_with_the_flag_that_helps(
    saved: Path,
) -> None:
    """Layer 0 shares its keys with a layer that trains."""
    frozen = {"FREEZE": "layers.0"}
    refused = load(saved, "frozen", UNTIED, **frozen)
    assert refused.returncode != 0
    assert re.search(r"  exp_avg/\S+( \(in part\))?: in the checkpoint, not in the mo", refused.log)
    assert "--no-load-optim loads the weights alone" in refused.log
    succeeded(load(saved, "weights", UNTIED, "--no-load-optim", **frozen))


def test_weights_alone_are_loaded_into_a_model_of_another_type(saved: Path) -> None:
    flags = [UNTIED, "--load", str(saved / "S"), "--no-load-optim"]
    model = [flag for flag in MODEL if flag != "--bf16"]
    log = succeeded(run_job(saved, "fp32", [*model, *flags], ranks=1)).log
    assert "weights of type BF16 become F32" in log


def test_another_vocabulary_is_refused_except_to_finetune(saved: Path) -> None:
    """Rows of words would be cut off; `test_reshard.py` has other padding."""
    flags = [UNTIED, "--vocab-size", "300"]
    refused = load(saved, "resume", *flags)
    assert refused.returncode != 0
    assert f"{ROWS}, 384 in the model" in refused.log
    tuned = succeeded(load(saved, "tuned", *flags, "--finetune"))
    assert f"{ROWS}, 384 in the model" in tuned.log
