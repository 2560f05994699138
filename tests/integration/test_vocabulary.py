"""A job resumes with another `--vocab-size`: rows of words would be cut off or added."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.megatron_jobs import Result, run_job, succeeded

MODEL = ["--num-layers", "2", "--bf16", "--train-iters", "3", "--save-interval", "2"]
KEY = "embedding.word_embeddings.weight: 512 rows in the checkpoint"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("vocabulary")
    succeeded(
        run_job(
            where, "first", [*MODEL, "--save", str(where / "S"), "--exit-interval", "2"], ranks=1
        )
    )
    return where


def resumed(saved: Path, name: str, *flags: str) -> Result:
    """Load the checkpoint of a job of 500 words (512 rows with padding), and train on."""
    arguments = [*MODEL, "--load", str(saved / "S"), *flags]
    return run_job(saved, name, arguments, ranks=1)


@pytest.mark.parametrize(("words", "rows"), [(300, 384), (600, 640)])
def test_another_vocabulary_is_refused_except_to_finetune(
    saved: Path, words: int, rows: int
) -> None:
    size = ["--vocab-size", str(words)]
    refused = resumed(saved, f"resume-{words}", *size)
    assert refused.returncode != 0
    assert f"{KEY}, {rows} in the model" in refused.log
    tuned = succeeded(resumed(saved, f"tune-{words}", *size, "--finetune"))
    assert f"{KEY}, {rows} in the model" in tuned.log


def test_other_padding_is_accepted(saved: Path) -> None:
    padded = succeeded(resumed(saved, "padding", "--make-vocab-size-divisible-by", "640"))
    assert KEY not in padded.log
    assert sorted(padded.losses()) == [3]
