"""`slots: 1` under real Megatron: a copy that is torn costs the memory of the save before it."""

from __future__ import annotations

from pathlib import Path

from megatron_flashckpt.failpoints import VARIABLE
from tests.support.megatron_jobs import Result, differing, run_job, succeeded, tensors

MODEL = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer"]


def test_a_restart_after_a_torn_copy_resumes_from_storage_bit_for_bit(tmp_path: Path) -> None:
    def run(name: str, restarts: int = 0, **env: str) -> Result:
        save = str(tmp_path / name)
        schedule = ["--train-iters", "6", "--save", save, "--load", save, "--save-interval", "3"]
        options = {"max_restarts": restarts, "env": {"FLASHCKPT_SLOTS": "1", **env}}
        return succeeded(run_job(tmp_path, name, [*MODEL, *schedule], ranks=2, **options))

    whole = run("whole")
    killed = run("killed", 1, **{VARIABLE: "rank1:save.staging:2:KILL"})
    assert "iteration 3 was restored from storage" in killed.log
    expected = whole.losses()
    assert killed.losses(1) == {iteration: expected[iteration] for iteration in (4, 5, 6)}
    assert differing(tensors(tmp_path / "whole", 6), tensors(tmp_path / "killed", 6)) == []
    line = (
        "flashckpt: slots: 1: a save begins when the previous one is committed or has failed; a "
        "crash during its copies into host memory resumes from storage"
    )
    assert whole.log.count(line) == 1
    assert "flashckpt: host memory: 1 slot of " in whole.log
