"""A job whose memory holds a checkpoint is started by hand with another number of ranks.

Memory holds iteration 5, which was saved for memory only. Ranks that the dead job did not have
receive their state from the ranks that hold it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.integration.test_resume import DISTRIBUTED
from tests.support.megatron_jobs import (
    Result,
    run_job,
    succeeded,
)

MODEL = ["--num-layers", "2", "--bf16", *DISTRIBUTED]
PATIENT = {"FLASHCKPT_AGENT__GRACE_S": "120"}
COPY = {
    "FLASHCKPT_REDUNDANCY": "copy",
    "FLASHCKPT_REDUNDANCY_GROUP": "2",
    "FLASHCKPT_AGENT__ADDRESS": "127.0.0.1",
}


@dataclasses.dataclass(frozen=True)
class Jobs:
    """The dead job and its successor, which share a save directory."""

    where: Path
    interval: int = 100
    """Iterations between saves to storage."""
    nodes: int = 1

    def run(self, name: str, ranks: int, interval: int, env: dict[str, str]) -> Result:
        save = str(self.where / "S")
        arguments = ["--train-iters", "7", "--save", save, "--load", save]
        intervals = ["--save-interval", str(interval), "--non-persistent-save-interval", "5"]
        return run_job(
            self.where,
            name,
            [*MODEL, *arguments, *intervals],
            ranks=ranks,
            nodes=self.nodes,
            env={**PATIENT, **env},
        )

    def crash(self, ranks: int, env: dict[str, str] | None = None) -> None:
        """Run a job that dies in iteration 6; its last save, of iteration 5, is in memory."""
        crashed = self.run("crash", ranks, self.interval, env or {"KILL": "1:6"})
        assert crashed.returncode != 0


def test_new_ranks_of_new_nodes_receive_from_copies(tmp_path: Path) -> None:
    """Rank 1 moves to the first node, which holds a copy of its part."""
    jobs = Jobs(tmp_path, interval=2, nodes=2)
    once = f"{tmp_path}/run/*/agent-*.log:iteration 5 is held by:2"
    jobs.crash(2, {**COPY, "KILL": "1:6", "KILL_ONCE": once})
    resumed = succeeded(jobs.run("more", 4, 100, COPY))
    assert "iteration 5 was restored from memory" in resumed.log
    assert sorted(resumed.losses()) == [6, 7]


def test_a_job_does_not_start_from_scratch_beside_memory_it_cannot_reach(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, nodes=2)
    jobs.crash(2)
    refused = jobs.run("more", 4, 100, {})
    assert refused.returncode != 0
    assert "iteration 5 in host memory, saved by 2 ranks, is incomplete" in refused.log
    assert "Start the job with 2 ranks" in refused.log
    resumed = succeeded(jobs.run("same", 2, 100, {}))
    assert "iteration 5 was restored from memory" in resumed.log


def test_a_rank_that_died_while_it_copied_is_named(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, interval=3)
    jobs.crash(2, {"FLASHCKPT_FAULT": "rank1:stage.copied:2"})
    resumed = succeeded(jobs.run("again", 2, 100, {}))
    assert "iteration 5 in host memory, saved by 2 ranks, is incomplete" in resumed.log
    assert "ranks 1 do not have their parts" in resumed.log
    assert "training resumes from iteration 3" in resumed.log
