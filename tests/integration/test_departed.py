"""A job of two ranks crashes and is restarted with one rank: the node frees the other's memory.

The second job is killed as well, so that its agent stays and can be inspected.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from megatron_flashckpt.agent.place import place_of
from tests.agent.test_departed_ranks import slabs
from tests.integration.test_resume import DISTRIBUTED, schedule
from tests.support.megatron_jobs import run_job
from tests.support.trainer import agents_under, eventually, is_alive

MODEL = ["--num-layers", "2", "--bf16", *DISTRIBUTED]
PATIENT = {"FLASHCKPT_AGENT__GRACE_S": "200"}


def test_a_job_with_fewer_ranks_frees_the_memory_of_departed_ranks(tmp_path: Path) -> None:
    save = tmp_path / "save"
    arguments = [*MODEL, *schedule(save)]
    two = run_job(tmp_path, "two", arguments, ranks=2, env={"KILL": "1:5", **PATIENT})
    assert two.returncode != 0
    (agent,) = agents_under(tmp_path / "run")
    try:
        eventually("iteration 3 is committed", (save / "latest_checkpointed_iteration.txt").exists)
        assert slabs(agent) == [0, 1]
        one = run_job(tmp_path, "one", arguments, ranks=1, env={"KILL": "0:5", **PATIENT})
        assert "iteration 3: was saved by 2 ranks, and this job has 1" in one.log
        assert "iteration 3 was restored from storage" in one.log
        assert agents_under(tmp_path / "run") == [agent]
        eventually("rank 1's memory is freed", lambda: slabs(agent) == [0])
        agent_log = place_of(str(save), str(tmp_path / "run")).log.read_text()
        assert re.search(
            r"freed .* of rank 1 \(iteration 3, in storage, of an earlier run\)", agent_log
        )
    finally:
        os.kill(agent, signal.SIGTERM)
        eventually("the end of the agent", lambda: not is_alive(agent))
