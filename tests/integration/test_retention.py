"""Retention on real Megatron: the best checkpoint by the validation loss that Megatron computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.megatron_jobs import run_job, succeeded
from tests.support.trainer import eventually


def test_retention_keeps_the_best_validation_loss_and_the_newest_checkpoint(tmp_path: Path) -> None:
    """Only the last pipeline stage knows the loss, and rank 0 is on another stage."""
    save = tmp_path / "save"
    result = succeeded(
        run_job(
            tmp_path,
            "best",
            [
                *("--num-layers", "2", "--bf16", "--pipeline-model-parallel-size", "2"),
                *("--train-iters", "8", "--save", str(save), "--save-interval", "2"),
                *("--eval-interval", "2", "--eval-iters", "1", "--lr", "1.0"),
            ],
            ranks=2,
            env={"FLASHCKPT_RETENTION__BEST": "{metric: lm loss validation, keep: 2}"},
        )
    )
    logged = re.findall(r"validation loss at iteration (\d+) \| lm loss value: (\S+)", result.log)
    losses = {int(iteration): float(loss) for iteration, loss in logged}
    assert sorted(losses) == [2, 4, 6, 8]
    best = sorted(losses, key=lambda iteration: losses[iteration])[:2]

    store = PosixStore(save)

    def kept() -> list[int]:
        return [checkpoint.iteration for checkpoint in read_facts(store).stored]

    eventually("retention", lambda: kept() == sorted({*best, 8}))
    for checkpoint in read_facts(store).stored:
        stored = StoredCheckpoint(store, checkpoint, read_manifest(store, checkpoint))
        assert stored.manifest.metrics == {
            "lm loss validation": pytest.approx(losses[checkpoint.iteration], rel=1e-5)
        }
