"""An agent is killed while trainers live; the next agent finishes its saves."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.config import Retention
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.end import End, kind_of
from megatron_flashckpt.storage.posix_files import PART
from tests.agent.conftest import Node
from tests.support.stored import assert_intact
from tests.support.trainer import (
    blocked_shard,
    eventually,
    is_alive,
    kill_agent,
    new_save_id,
)

#: Failpoints from the "staged" message to the report of the result; `tools/crash` has all.
STEPS = ["persist.chunk:1", "persist.record:1", "commit.end:1", "save.marked:1"]
#: Failpoints that are hit after the slots are marked.
TOLD = STEPS[-1:]
LATEST = Retention(latest=1)


def is_only_the_checkpoint(directory: Path) -> bool:
    left = [
        path
        for path in directory.iterdir()
        if path.suffix not in (".safetensors", ".msgpack", ".tmp")
    ]
    return [path.suffix for path in left] == [".end"]


@pytest.mark.parametrize(
    ("step", "is_late"), [*((step, False) for step in STEPS), ("persist.record:1", True)]
)
def test_the_successor_of_an_agent_killed_at_any_step_finishes_the_save(
    node: Node,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    is_late: bool,
) -> None:
    """The successor never rewrites a file that a commit may already name.

    Args:
        is_late: the successor does not see the record of its predecessor.
    """
    trainer = node.trainer(root)
    trainer.open_run()
    assert trainer.save(1).error is None
    eventually("the removal of its records", lambda: not list(root.rglob("*.record")))
    kill_agent(trainer.client.agent_pid)
    reached = tmp_path / "reached"
    monkeypatch.setenv("FLASHCKPT_FAULT", f"agent:{step}:KILL:{reached}")
    assert trainer.reconnect() == (), "every slot is durable"
    agent, save_id = trainer.client.agent_pid, trainer.new_save_id()
    with contextlib.suppress(AgentError):  # the agent may die before it answers
        trainer.stage(2, save_id)
    eventually("the end of the agent", lambda: not is_alive(agent))
    assert reached.exists()
    directory = root / file_names.iteration_dir(2)
    shard = directory / file_names.shard_name(0, save_id)
    before = shard.stat() if shard.exists() else None
    if is_late:
        (directory / file_names.record_name(range(1), save_id)).rename(tmp_path / "record")
    taken = trainer.reconnect()
    if taken:
        outcome = trainer.outcome()
        assert (outcome.save_id, outcome.error) == (save_id, None)
    else:
        assert step in TOLD
    assert_intact(root, 2, [trainer])
    if not taken:  # the next agent tidies after its next commit
        assert trainer.save(3).error is None
    eventually("the removal of all other files", lambda: is_only_the_checkpoint(directory))
    if before is not None:
        assert (shard.stat().st_ino, shard.stat().st_mtime_ns) == (
            before.st_ino,
            before.st_mtime_ns,
        )
    assert [offer.durable for offer in trainer.take()] == [True, True]
    assert trainer.save(4).error is None


def test_a_late_rank_learns_the_result_of_a_save_that_retention_removed(
    node: Node, other_node: Node, root: Path
) -> None:
    """The shard was durable when the agent died, so the agent of the other node committed it."""
    late, prompt = node.trainer(root, 1, 2), other_node.trainer(root, 0, 2, retention=LATEST)
    late.join(prompt.open_run())
    first, second = late.new_save_id(), late.new_save_id()
    for iteration, save_id in ((1, first), (2, second)):
        late.stage(iteration, save_id)
        record = (
            root
            / file_names.iteration_dir(iteration)
            / file_names.record_name(range(1, 2), save_id)
        )
        eventually("the commit record", record.exists)
    kill_agent(late.client.agent_pid)
    assert prompt.save(1, first).error is None
    assert prompt.save(2, second).error is None
    removed = root / file_names.iteration_dir(1)
    eventually("the removal by retention", lambda: len(list(removed.iterdir())) == 1)
    assert late.reconnect() == (first, second)
    outcomes = [late.outcome(), late.outcome()]
    assert {(outcome.iteration, outcome.save_id, outcome.error) for outcome in outcomes} == {
        (1, first, None),
        (2, second, None),
    }
    (end,) = removed.iterdir()
    assert end.suffix == ".end", "the save was not written again"
    assert_intact(root, 2, [prompt, late])


def test_a_reconnected_rank_gets_its_result_and_its_slot_is_read_once(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root)
    agent, save_id = trainer.client.agent_pid, new_save_id()
    with blocked_shard(root, 1, 0, save_id) as unblock:
        trainer.stage(1, save_id)
        assert trainer.reconnect() == (save_id,)
        assert trainer.client.agent_pid == agent
        other = trainer.begin(2, new_save_id())
        assert other is not None
        assert trainer.client.acquire(0.0) == other.index, "the first slot is being read"
        unblock()
        assert trainer.outcome().save_id == save_id
    assert_intact(root, 1, [trainer])
    log = node.log(root).read_text()
    assert log.count("persisted iteration 1") == 1


def test_a_save_in_the_slots_of_rank_0_is_not_dead_for_a_new_agent(node: Node, root: Path) -> None:
    """The janitor of a new agent begins once that rank has handed over its slots."""
    first = node.trainer(root, slots=3)
    run = first.open_run()
    older = first.new_save_id()
    with blocked_shard(root, 10, 0, older) as unblock:
        first.stage(10, older)
        newer = first.new_save_id()
        assert first.save(20, newer).error is None
        first.hang_up()
        again = node.trainer(root, slots=3)
        again.take()
        again.open_run(Save(20, newer), run.ancestors)
        kill_agent(again.client.agent_pid)
        unblock()
        again.find_agent()  # the new agent gets the run first, and the slab later
        time.sleep(0.5)
        again.attach()
        end = root / file_names.iteration_dir(10) / file_names.end_name(older)
        eventually("the end", end.exists)
    assert kind_of(end.read_bytes()) is End.COMMITTED


def test_a_failed_save_of_a_killed_agent_gives_its_space_back(
    small_disk: Path, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk no later save would be written, and the janitor waits for a commit."""
    root = small_disk / "save"
    with monkeypatch.context() as patched:
        patched.setenv("FLASHCKPT_FAULT", f"agent:persist.chunks:1:KILL:{tmp_path / 'reached'}")
        trainer = node.trainer(root, numel=100_000, slots=1)
    agent = trainer.client.agent_pid
    trainer.open_run()
    save_id = trainer.new_save_id()
    trainer.stage(5, save_id)
    eventually("the end of the agent", lambda: not is_alive(agent))
    assert list(root.rglob(f".*{PART}"))
    trainer.call_off(5, save_id, "another node has failed")
    trainer.reconnect()
    assert "another node has failed" in (trainer.outcome().error or "")
    assert trainer.save(6).error is None
    assert not list(root.rglob(f".*{PART}"))
