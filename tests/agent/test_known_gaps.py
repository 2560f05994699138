"""Faults of ages and commits that the next commit protocol makes impossible.

Each test states the right behaviour and fails now. A test that passes ends its `xfail`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.catalog import retention
from megatron_flashckpt.config import Retention
from megatron_flashckpt.file_format.manifest import CommitFacts
from tests.agent.conftest import Node
from tests.support.trainer import eventually, is_alive, new_save_id


def gap(reason: str) -> Any:
    return pytest.mark.xfail(strict=True, reason=reason)


def commit_of(iteration: int, hours_ago: float) -> CommitFacts:
    return CommitFacts(
        iteration=iteration,
        save_id=new_save_id(),
        committed_at=time.time() - 3600 * hours_ago,
    )


@gap("ages compare clocks of hosts")
@pytest.mark.parametrize("hours", [100, -100], ids=["agent's clock", "clock of the commits"])
def test_a_wrong_clock_removes_no_young_checkpoint(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """The agent started while its clock was ahead, or earlier commits were made with a late one."""
    steady = time.clock_gettime(time.CLOCK_BOOTTIME)
    ahead = max(hours, 0)
    wall = time.time() + 3600 * ahead
    monkeypatch.setattr(retention, "_STARTED", (wall, steady))
    monkeypatch.setattr(retention, "time", SimpleNamespace(time=lambda: wall, **_clocks()))
    commits = [
        commit_of(2, 1.0 - min(hours, 0)),
        commit_of(4, 0.5 - min(hours, 0)),
        commit_of(6, 0),
    ]
    kept = retention.why_kept(
        commits,
        Retention(max_age_hours=24),
        retain_interval=None,
        tracked=6,
        previous=4,
        now=retention._now(),
    )
    assert [iteration for iteration, reasons in kept.items() if not reasons] == []


def _clocks() -> dict[str, Any]:
    return {"clock_gettime": time.clock_gettime, "CLOCK_BOOTTIME": time.CLOCK_BOOTTIME}


def ranks_out_of_step(node: Node, root: Path, **agent: float) -> int:
    """Return the agent of two dead ranks, of which only one has staged the last save."""
    config = node.config(**agent)
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    save_id = new_save_id()
    for trainer in trainers:
        trainer.stage(4, save_id)
    assert [trainer.outcome().error for trainer in trainers] == [None, None]
    trainers[0].stage(7, new_save_id())
    for trainer in trainers:
        trainer.hang_up()
    return trainers[0].client.agent_pid


@gap("the agent waits for a part that no rank can stage any more")
def test_a_save_that_cannot_be_complete_does_not_delay_an_agent_after_sigterm(
    node: Node, root: Path
) -> None:
    agent = ranks_out_of_step(node, root, sigterm_timeout_s=15.0)
    os.kill(agent, signal.SIGTERM)
    eventually("the end of the agent", lambda: not is_alive(agent), 5.0)


@gap("the agent waits for a part that no rank can stage any more")
def test_a_save_that_cannot_be_complete_does_not_prolong_the_grace_time(
    node: Node, root: Path
) -> None:
    agent = ranks_out_of_step(node, root, grace_s=0.5)
    eventually("the end of the agent", lambda: not is_alive(agent), 5.0)
