"""An agent is killed while trainers live: the next one ends what was staged at the first."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from megatron_flashckpt.config import Retention
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.memory.slot import SlotState
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact, save_all
from tests.support.trainer import FakeTrainer, eventually, held_back, is_alive, new_save_id

#: Fault points from the doorbell to telling the outcome, and which time round: four small files are
#: put (record, common state, manifest, tracker), and two older ones deleted at the least.
STEPS = [
    *("agent.enqueued:1", "persist.created:1", "persist.chunk:1", "persist.chunks:1"),
    *("persist.header:1", "file.synced:1", "persist.durable:1", "persist.record:1"),
    *(f"put.{step}:{count}" for step in ("written", "renamed") for count in (1, 2, 3, 4)),
    *("commit.ready:1", "commit.common:1", "commit.manifest:1", "commit.tracker:1"),
    *("save.marked:1", "leftover.file:1", "commit.tidy:1", "commit.done:1"),
]
#: Those at which the slots are marked already.
TOLD = STEPS[-4:]


def kill_agent(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    eventually("the agent's end", lambda: not is_alive(pid))


def is_only_the_checkpoint(directory: Path) -> bool:
    left = [
        path
        for path in directory.iterdir()
        if path.suffix not in (".safetensors", ".msgpack", ".tmp")
    ]
    return [path.name for path in left] == [file_names.MANIFEST]


def test_what_two_ranks_had_staged_is_committed_by_the_next_agent_and_told(
    node: Node, root: Path
) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    first, save_id = trainers[0].client.agent_pid, new_save_id()
    with held_back(root / file_names.iteration_dir(1) / file_names.shard_name(1, save_id)):
        for trainer in trainers:
            trainer.stage(1, save_id)
        kill_agent(first)
    assert not (root / file_names.TRACKER).exists()
    assert [trainer.reconnect() for trainer in trainers] == [(save_id,)] * 2
    assert trainers[0].client.agent_pid == trainers[1].client.agent_pid != first
    for trainer in trainers:
        outcome = trainer.outcome()
        assert (outcome.iteration, outcome.save_id, outcome.error) == (1, save_id, None)
    assert_intact(root, 1, trainers)
    assert save_all(trainers, 2) == [None, None]


@pytest.mark.parametrize("step", STEPS)
def test_an_agent_killed_at_any_step_is_succeeded_by_one_that_ends_the_save(
    node: Node, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """And that never writes again to a file that a commit may stand on already."""
    trainer = node.trainer(root)
    assert trainer.save(1).error is None
    kill_agent(trainer.client.agent_pid)
    reached = tmp_path / "reached"
    monkeypatch.setenv("FLASHCKPT_FAULT", f"agent:{step}:KILL:{reached}")
    assert trainer.reconnect() == (), "all is durable"
    agent, save_id = trainer.client.agent_pid, new_save_id()
    with contextlib.suppress(AgentError):  # it may be gone before it has answered the doorbell
        trainer.stage(2, save_id)
    eventually("the agent's end", lambda: not is_alive(agent))
    assert reached.exists()
    directory = root / file_names.iteration_dir(2)
    shard = directory / file_names.shard_name(0, save_id)
    is_durable = (directory / file_names.record_name(0, save_id)).exists() or (
        directory / file_names.MANIFEST
    ).exists()
    before = shard.stat() if is_durable else None
    taken = trainer.reconnect()
    if taken:
        outcome = trainer.outcome()
        assert (outcome.save_id, outcome.error) == (save_id, None)
    else:
        assert step in TOLD
    assert_intact(root, 2, [trainer])
    if not taken:  # the first agent was about to tidy up; the next one does after its next commit
        assert trainer.save(3).error is None
    eventually("all else is tidied away", lambda: is_only_the_checkpoint(directory))
    if before is not None:
        assert (shard.stat().st_ino, shard.stat().st_mtime_ns) == (
            before.st_ino,
            before.st_mtime_ns,
        )
    assert [offer.durable for offer in trainer.take()] == [True, True]
    assert trainer.save(4).error is None


def test_a_save_that_was_overtaken_at_the_first_agent_does_not_move_the_tracker_back(
    node: Node, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one was committed; the first agent was killed before it had told anybody."""
    monkeypatch.setenv("FLASHCKPT_FAULT", f"agent:commit.tracker:1:KILL:{tmp_path / 'reached'}")
    trainer = node.trainer(root, retain_interval=100)
    agent, slow, fast = trainer.client.agent_pid, new_save_id(), new_save_id()
    with held_back(root / file_names.iteration_dir(1) / file_names.shard_name(0, slow)):
        trainer.stage(1, slow)
        with contextlib.suppress(AgentError):
            trainer.stage(2, fast)
        eventually("the agent's end", lambda: not is_alive(agent))
    assert (root / file_names.TRACKER).read_text() == "2"
    assert trainer.reconnect() == (slow, fast)
    outcomes = {trainer.outcome().iteration, trainer.outcome().iteration}
    assert outcomes == {1, 2}
    assert_intact(root, 2, [trainer])


def test_a_rank_that_comes_late_is_told_of_a_save_that_retention_has_removed_since(
    node: Node, root: Path
) -> None:
    """Its part was durable when the agent died; with that the others' agent has committed it."""
    late = node.trainer(root, 1, 2)
    first, second = new_save_id(), new_save_id()
    for iteration, save_id in ((1, first), (2, second)):
        late.stage(iteration, save_id)
        record = root / file_names.iteration_dir(iteration) / file_names.record_name(1, save_id)
        eventually("its record", record.exists)
    kill_agent(late.client.agent_pid)
    prompt = node.trainer(root, 0, 2, retention=Retention(latest=1))
    assert prompt.save(1, first).error is None
    assert prompt.save(2, second).error is None
    removed = root / file_names.iteration_dir(1)
    eventually("its removal", lambda: not removed.exists())
    assert late.reconnect() == (first, second)
    outcomes = [late.outcome(), late.outcome()]
    assert {(it.iteration, it.save_id, it.error) for it in outcomes} == {
        (1, first, None),
        (2, second, None),
    }
    assert not removed.exists(), "nothing of it was written again"
    assert_intact(root, 2, [prompt, late])
    assert save_all([prompt, late], 3) == [None, None]


def test_what_was_staged_is_persisted_though_its_trainer_died_before_the_doorbell(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    slot = trainer.begin(1, new_save_id())
    assert slot is not None
    trainer.fill(slot, b"\1" * trainer.layout.nbytes)
    slot.set_state(SlotState.STAGED)
    trainer.client.close()
    eventually("the mark", lambda: slot.header.state == SlotState.DURABLE)
    assert (root / file_names.TRACKER).read_text() == "1"
    trainer.reconnect()
    assert trainer.client.poll(0.0).finished == (), "its former life's save is none of its business"


def test_a_rank_that_reconnects_to_the_same_agent_is_told_and_its_slot_is_read_once(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    agent, save_id = trainer.client.agent_pid, new_save_id()
    with held_back(
        root / file_names.iteration_dir(1) / file_names.shard_name(0, save_id)
    ) as let_go:
        trainer.stage(1, save_id)
        assert trainer.reconnect() == (save_id,)
        assert trainer.client.agent_pid == agent
        other = trainer.begin(2, new_save_id())
        assert other is not None
        assert trainer.client.acquire(3, new_save_id(), 0.0) == other.index, "the first is read"
        let_go()
        assert trainer.outcome().save_id == save_id
    assert_intact(root, 1, [trainer])
    log = (node.directory(root) / "agent.log").read_text()
    assert log.count("persisted iteration 1") == 1


def test_a_copy_cut_short_with_its_agent_is_not_taken_over(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    assert trainer.save(1).error is None
    assert trainer.begin(2, new_save_id()) is not None
    kill_agent(trainer.client.agent_pid)
    assert trainer.reconnect() == ()
    assert [offer.iteration for offer in trainer.take()] == [1]


def test_a_save_that_lacks_a_rank_is_not_committed_by_the_next_agent(
    node: Node, root: Path
) -> None:
    trainers: list[FakeTrainer] = [node.trainer(root, rank, 2) for rank in range(2)]
    assert save_all(trainers, 1) == [None, None]
    trainers[0].stage(2, save_id := new_save_id())
    kill_agent(trainers[0].client.agent_pid)
    assert [trainer.reconnect() for trainer in trainers] == [(save_id,), ()]
    record = root / file_names.iteration_dir(2) / file_names.record_name(0, save_id)
    eventually("its shard is durable again", record.exists)
    assert trainers[0].client.poll(0.2).pending == 1
    assert_intact(root, 1, trainers)
    assert save_all(trainers, 3) == [None, None]
    assert_intact(root, 3, trainers)
