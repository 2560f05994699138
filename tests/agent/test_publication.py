"""Publication: a node creates one commit record for all its ranks, and waits for them in bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from megatron_flashckpt.agent import commit_core as core
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.end import Failure
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact
from tests.support.agents import agent_here
from tests.support.trainer import FakeTrainer, new_save_id


class NotingStore(PosixStore):
    """A real store of agents in this process, which notes the records that it creates."""

    records: ClassVar[list[str]] = []

    def create(self, name: str, data: bytes) -> None:
        if name.endswith(".record"):
            self.records.append(name.rpartition("/")[2])
        super().create(name, data)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(NotingStore, "records", [])
    monkeypatch.setattr("megatron_flashckpt.agent.state.open_store", NotingStore)
    # A busy machine must not make any rank count as slow.
    monkeypatch.setattr(core, "_PUBLISH_S", (60.0, 60.0))
    return NotingStore.records


def stage_all(trainers: list[FakeTrainer], iteration: int) -> str:
    save_id = new_save_id()
    for trainer in trainers:
        trainer.stage(iteration, save_id)
    return save_id


def test_each_of_two_nodes_creates_the_records_of_its_contiguous_ranks(
    node: Node, other_node: Node, root: Path, records: list[str]
) -> None:
    with agent_here(node, root), agent_here(other_node, root):
        trainers = [node.trainer(root, rank, 5) for rank in (0, 2)]
        trainers += [other_node.trainer(root, rank, 5) for rank in (1, 3, 4)]
        save_id = stage_all(trainers, 1)
        assert [trainer.outcome().error for trainer in trainers] == [None] * 5
        runs = (range(1), range(1, 2), range(2, 3), range(3, 5))
        assert sorted(records) == [file_names.record_name(ranks, save_id) for ranks in runs]
        assert_intact(root, 1, trainers)


# ---------------------------------------------------------------------- when records are due

WORLD = 4


def written(*durable: int, at: float = 0.0, connected: tuple[int, ...] = ()) -> core.CommitCore:
    """Return a save of a node with ranks 0 and 1, and their shards that are durable."""
    machine = core.CommitCore("here", WORLD, 0.0, 3600.0, core.Pace())
    for rank in (0, 1):
        machine.note(0.0, core.Joined(rank))
    machine.note(at, core.Connected(frozenset(connected)))
    for rank in durable:
        machine.note(at, core.Durable(rank))
    return machine


def is_due(machine: core.CommitCore, at: float = 0.0) -> bool:
    return isinstance(machine.next(at), core.WriteRecords)


def test_records_wait_for_connected_and_writing_ranks_of_this_job() -> None:
    assert is_due(written(0, 1, connected=(0, 1)))
    assert is_due(written(0, 1, connected=(0, 1, 4, 9))), "ranks of another job of this node"
    assert is_due(written(0, 1)), "the trainers of the other ranks are gone"
    assert not is_due(written(0, 1, connected=(0, 1, 2))), "rank 2 will stage its slot in a moment"
    assert not is_due(written(0, connected=(0, 1))), "the shard of rank 1 is being written"


@pytest.mark.parametrize(
    ("since_s", "wait_s"), [(0.0, 2.0), (8.0, 2.0), (24.0, 6.0), (40.0, 10.0), (900.0, 10.0)]
)
def test_a_longer_save_waits_longer_within_bounds(since_s: float, wait_s: float) -> None:
    machine = written(0, at=since_s, connected=(0, 1, 2))
    machine.note(since_s + wait_s - 0.2, core.Durable(1))  # does not extend the wait of the first
    assert not is_due(machine, since_s + wait_s - 0.1)
    assert is_due(machine, since_s + wait_s)


def test_a_save_that_has_failed_publishes_no_record() -> None:
    machine = written(0)
    machine.note(0.0, core.GivenUp(Failure(failed="no space")))
    machine.note(0.0, core.Durable(1))
    assert machine.next(0.0) == core.Fail(Failure(failed="no space"), frozenset({0, 1}))
