"""What agents record of saves: timings in the manifest and in the history."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_flashckpt.file_format.file_names import HISTORY, shard_name
from megatron_flashckpt.layout.save_cost import RankCost
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.histories import saves_in
from tests.support.stored import stored
from tests.support.trainer import eventually, new_save_id


def test_manifest_and_history_hold_the_timings_of_a_save(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    save_id, called = new_save_id(), time.time()
    for trainer, blocked_s in zip(trainers, (0.25, 0.125), strict=True):
        cost = RankCost(started_at=called, blocked_s=blocked_s, staged_s=1 - blocked_s)
        trainer.stage(7, save_id, cost=cost)
    outcomes = [trainer.outcome() for trainer in trainers]
    manifest = stored(root, 7).manifest
    timings = manifest.cost
    assert timings is not None
    assert (timings.blocked_s, timings.staged_s, timings.started_at) == (0.25, 0.875, called)
    assert timings.nbytes == sum(shard.nbytes for shard in manifest.shards)
    assert 0 < timings.persisted_s <= timings.durable_s <= time.time() - called
    assert timings.slowest in (0, 1)
    assert [outcome.cost for outcome in outcomes] == [timings, timings]
    (line,) = eventually("the line of the save", lambda: saves_in(root))
    assert (line.iteration, line.save_id, line.error, line.world_size) == (7, save_id, None, 2)
    assert line.cost == timings


def test_a_failed_save_is_in_the_history_with_its_reason(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    assert trainer.save(1).error is None
    save_id = new_save_id()
    (root / "iter_0000003" / shard_name(0, save_id)).mkdir(parents=True)
    failed = trainer.save(3, save_id)
    assert failed.error is not None
    eventually("the line of the failure", lambda: len(saves_in(root)) == 2)
    assert [(line.iteration, line.error) for line in saves_in(root)] == [
        (1, None),
        (3, failed.error),
    ]


def test_a_history_may_be_turned_off(node: Node, root: Path) -> None:
    quiet = msgspec.structs.replace(node.config(), history=0)
    assert node.trainer(root, config=quiet).save(1).error is None
    assert not (root / HISTORY).exists()


def test_a_history_or_traces_that_hang_delay_no_result(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    class Hanging(PosixStore):
        def create(self, name: str, data: bytes) -> None:
            if name.startswith(HISTORY):
                go_on.wait()
            super().create(name, data)

    class HangingTraces(type(Path())):  # type: ignore[misc]
        def mkdir(self, *args: Any, **more: Any) -> None:
            go_on.wait()
            super().mkdir(*args, **more)

    with agent_here(node, root, history=9) as agent:
        monkeypatch.setattr(agent._node, "store_at", Hanging)
        agent._node.traces._directory = HangingTraces(root / "traces")
        trainer = node.trainer(root)
        try:
            assert [trainer.save(iteration).error for iteration in (1, 2)] == [None, None]
            assert saves_in(root) == []
        finally:
            go_on.set()
        eventually("the lines", lambda: [line.iteration for line in saves_in(root)] == [1, 2])
        eventually("the traces", lambda: len(list((root / "traces").glob("*.json"))) == 2)
