"""A job loads a reference model from its own save directory while it trains.

Training does not continue from that model, so the job's memory and reports stay as they are.
"""

from __future__ import annotations

from pathlib import Path

from tests.integration.test_resume import DISTRIBUTED
from tests.support.megatron_jobs import run_job, succeeded

MODEL = ["--num-layers", "2", "--bf16", *DISTRIBUTED]


def test_the_load_of_a_reference_model_leaves_memory_as_it_is(tmp_path: Path) -> None:
    save = str(tmp_path / "S")
    schedule = ["--train-iters", "8", "--save-interval", "2", "--non-persistent-save-interval", "5"]
    first = f"{save}/latest_checkpointed_iteration.txt"
    ran = run_job(
        tmp_path,
        "ran",
        [*MODEL, *schedule, "--save", save, "--load", save],
        ranks=2,
        max_restarts=1,
        env={"REFERENCE": "6:2", "KILL": "1:6", "KILL_ONCE": f"{first}:4:1"},
    )
    log = succeeded(ran).log
    assert "iteration 2 was restored from storage" in log, "the reference model"
    assert "iteration 5 was restored from memory" in log, "the restarted job"
    starts = log.count("flashckpt: saves to ")
    assert starts == 2, "each start prints its settings once"
