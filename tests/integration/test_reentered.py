"""In-process restart: the training function of a living process fails, and is entered again."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatron_flashckpt.cli.commands import main
from tests.support.forked.nursery import REPO
from tests.support.megatron_jobs import Result, committed, run_job, succeeded

JOB = REPO / "tests/support/jobs/reentered.py"


def train(tmp_path: Path, name: str, fails: list[dict], **more: str) -> Result:
    """Run the job on two ranks: 8 iterations, a save every 2 iterations."""
    save = tmp_path / name
    arguments = f"--num-layers 2 --bf16 --use-distributed-optimizer --save {save} --load {save} "
    arguments += "--save-interval 2 --train-iters 8"
    env = {"FAILS": json.dumps(fails), "LOSS_LOG": str(tmp_path / f"losses-{name}"), **more}
    return run_job(tmp_path, name, arguments.split(), ranks=2, env=env, script=JOB)


def losses(tmp_path: Path, name: str, rank: int) -> list[str]:
    return Path(tmp_path / f"losses-{name}.{rank}").read_text().splitlines()


def test_a_function_that_fails_in_a_save_is_entered_again_and_resumes(tmp_path: Path) -> None:
    """Rank 1 does not take part in the save of iteration 4. Then all ranks fail after save 6."""
    succeeded(train(tmp_path, "whole", []))
    fails = [{"save": 4, "rank": 1}, {"save": 6, "rank": None}]
    log = succeeded(train(tmp_path, "again", fails)).log
    restored = re.findall(r"iteration \d+ was restored from \w+", log)
    assert restored == [f"iteration {n} was restored from memory" for n in (2, 6)], log
    for rank in range(2):
        whole, again = losses(tmp_path, "whole", rank), losses(tmp_path, "again", rank)
        per_iteration = len(whole) // 8
        entered = [range(4), range(2, 6), range(6, 8)]
        assert again == [
            line
            for iterations in entered
            for line in whole[iterations[0] * per_iteration : (iterations[-1] + 1) * per_iteration]
        ]
        held = re.findall(rf"rank {rank} after save \d holds (.*)", log)
        assert len(held) == 3
        assert set(held) == {held[0]}, log
    assert committed(tmp_path / "again") == [2, 4, 6, 8]
    assert main(["verify", str(tmp_path / "again")]) == 0
