"""A training job under torchrun, killed in the middle of handing over a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_flashckpt.faults import VARIABLE
from tests.megatron.jobs import run_job, succeeded

MODEL = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer"]


def test_a_job_killed_in_the_middle_of_a_save_goes_on_bit_for_bit_from_the_one_before(
    tmp_path: Path,
) -> None:
    save, reached = tmp_path / "save", tmp_path / "reached"
    result = succeeded(
        run_job(
            tmp_path,
            "job",
            [
                *(*MODEL, "--train-iters", "6", "--save-interval", "2"),
                *("--save", str(save), "--load", str(save)),
            ],
            ranks=2,
            max_restarts=1,
            torchrun=True,
            env={VARIABLE: f"rank1:stage.copied:2:KILL:{reached}"},
        )
    )
    assert reached.exists()
    said = re.findall(r"iteration (\d+) was restored from (\w+)", result.log)
    assert said == [("2", "memory")], "of iteration 4 all is copied, but not all is said"
    before, after = result.losses(0), result.losses(1)
    assert sorted(after) == [3, 4, 5, 6]
    for iteration in (3, 4):
        assert sorted(after[iteration]) == sorted(before[iteration])
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "6"
