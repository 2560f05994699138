"""Commits of two nodes on storage that shows names late, or has lost a shard.

The agents run in threads of the test. `test_commit_model` covers what they decide in any order of
events; here, real errors and real files lead to these decisions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.agent import commit_core as core
from megatron_flashckpt.agent.commit_core import CommitCore, Pace
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Entry
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact
from tests.support.agents import agent_here
from tests.support.trainer import FakeTrainer, eventually, new_save_id

DIRECTORY = file_names.iteration_dir(5)


@pytest.fixture
def ranks(node: Node, other_node: Node, root: Path) -> Iterator[list[FakeTrainer]]:
    """Two ranks on two nodes, whose agents run in this process."""
    with contextlib.ExitStack() as stack:
        for place in (node, other_node):
            stack.enter_context(agent_here(place, root))
        yield [place.trainer(root, rank, 2) for rank, place in enumerate((node, other_node))]


@pytest.mark.parametrize("comes", [True, False], ids=["late", "never"])
def test_a_shard_that_is_not_visible_fails_a_save_only_if_it_stays_so(
    ranks: list[FakeTrainer], root: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    if not comes:
        monkeypatch.setattr(core, "PATIENCE_S", 0.5)
    save_id = new_save_id()
    shard = file_names.shard_name(1, save_id)
    hidden = [shard] * (3 if comes else 10**4)
    stat = PosixStore.stat

    def hiding(self: PosixStore, name: str) -> Entry | None:
        if name.endswith(shard) and hidden:
            hidden.pop()
            return None
        return stat(self, name)

    monkeypatch.setattr(PosixStore, "stat", hiding)
    for trainer in ranks:
        trainer.stage(5, save_id)
    errors = [trainer.outcome().error for trainer in ranks]
    if comes:
        assert errors == [None, None]
        assert_intact(root, 5, ranks)
    else:
        assert errors[0] == errors[1], "both nodes have read the same end"
        assert f"{shard} is missing" in (errors[0] or "")
        assert not (root / file_names.TRACKER).exists()


def test_a_shard_that_was_cut_short_is_not_committed(ranks: list[FakeTrainer], root: Path) -> None:
    save_id = new_save_id()
    ranks[1].stage(5, save_id)
    record = root / DIRECTORY / file_names.record_name(range(1, 2), save_id)
    eventually("the commit record", record.exists)
    shard = root / DIRECTORY / file_names.shard_name(1, save_id)
    os.truncate(shard, 10)
    ranks[0].stage(5, save_id)
    errors = [trainer.outcome().error for trainer in ranks]
    assert errors[0] == errors[1]
    assert f"{shard.name} has 10 bytes instead of" in (errors[0] or "")
    assert not (root / file_names.TRACKER).exists()
    eventually("the removal of the shards", lambda: not list(root.rglob("*.safetensors")))


def waits(machine: CommitCore, until_s: float, answer: core.Observation) -> list[core.Action]:
    """Return what a node does until a time, if storage always gives one answer."""
    now, actions = 0.0, []
    while now < until_s:
        action = machine.next(now)
        if isinstance(action, core.Wait):
            now = action.until
        elif isinstance(action, core.Conclude):
            return actions
        else:
            actions.append(action)
            machine.note(now, answer)
    return actions


def node_with(*ranks: int, world_size: int = 4) -> CommitCore:
    """Return a node whose ranks have their records, at time 0."""
    machine = CommitCore("place", world_size, 0.0, 600.0, Pace())
    for rank in ranks:
        machine.note(0.0, core.Joined(rank))
        machine.note(0.0, core.Durable(rank, is_recorded=True))
    return machine


def test_a_waiting_node_asks_for_one_name_once_a_second_at_most() -> None:
    """Thousands of nodes ask one metadata server."""
    actions = waits(node_with(1), 100.0, core.Looked())
    assert set(actions) == {core.Look(records=False)}
    assert len(actions) < 110


def test_only_the_node_of_rank_0_lists_records() -> None:
    actions = waits(node_with(0), 100.0, core.Looked(frozenset({0, 1})))
    assert set(actions) == {core.Look(records=True)}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_node_of_rank_0_gives_up_after_20_s_and_the_others_wait_for_it(rank: int) -> None:
    machine = node_with(rank)
    actions = waits(machine, 500.0, core.Trouble("no answer", may_pass=True))
    proposes = any(isinstance(action, core.Fail) for action in actions)
    assert proposes == (rank == 0)
    assert isinstance(machine.next(500.0), core.Conclude) == (rank == 0)
