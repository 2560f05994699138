"""A checkpoint is loaded into a model that lacks a part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.megatron_jobs import Result, run_job, succeeded

MODEL = ["--num-layers", "2", "--bf16", "--train-iters", "3", "--save-interval", "2"]
HEAD = "weight/output_layer.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model whose output layer has a weight of its own."""
    where = tmp_path_factory.mktemp("models")
    flags = ["--untie-embeddings-and-output-weights", "--exit-interval", "2"]
    succeeded(run_job(where, "first", [*MODEL, *flags, "--save", str(where / "S")], ranks=1))
    return where


def load(saved: Path, name: str, *flags: str) -> Result:
    return run_job(saved, name, [*MODEL, "--load", str(saved / "S"), *flags], ranks=1)


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
