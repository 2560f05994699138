"""Faults of claims, ages and commits that the next commit protocol makes impossible.

Each test states the right behaviour and fails now. A test that passes ends its `xfail`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_flashckpt.agent import claim as claims
from megatron_flashckpt.agent import takeover
from megatron_flashckpt.catalog import retention
from megatron_flashckpt.config import Retention
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.manifest import CommitFacts
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.support.trainer import FakeTrainer, eventually, is_alive, new_save_id


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


@pytest.fixture
def writer(node: Node, root: Path) -> FakeTrainer:
    """A rank of a run that has claimed the directory and saved."""
    trainer = node.trainer(root)
    trainer.client.hold(trainer.claim())
    assert trainer.save(1).error is None
    return trainer


@gap("a claim has no digest and is not repaired")
def test_a_flipped_bit_in_the_claim_fails_no_save(writer: FakeTrainer, root: Path) -> None:
    path = root / file_names.CLAIM
    damaged = bytearray(path.read_bytes())
    damaged[0] ^= 0x80
    path.write_bytes(damaged)
    assert writer.save(2).error is None


@pytest.mark.parametrize(
    "renewed",
    [True, pytest.param(False, marks=gap("only a claim that was renewed is made again"))],
)
def test_a_removed_claim_comes_back(writer: FakeTrainer, root: Path, renewed: bool) -> None:
    made = (root / file_names.CLAIM).read_bytes()
    if renewed:
        eventually("a renewal", lambda: (root / file_names.CLAIM).read_bytes() != made)
    (root / file_names.CLAIM).unlink()
    eventually("the claim", (root / file_names.CLAIM).exists, 6.0)
    assert writer.save(2).error is None


@gap("the interval of a claim has no useful bound")
def test_a_claim_with_a_long_interval_does_not_block_a_start_for_hours(
    writer: FakeTrainer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = PosixStorage(root)
    claim = claims.read(storage)
    assert claim is not None
    dead = msgspec.structs.replace(claim, interval_s=3600.0, machine="another", run_id="dead")
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        assert clock.now < 600, "the start still waits"

    monkeypatch.setattr(
        takeover, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep, time=time.time)
    )
    monkeypatch.setattr(claims, "read", lambda _: dead)
    takeover._await_end(storage, lambda: writer.client, "refuse", 60.0)
