"""A slot that cannot be digested, with an agent in the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.agent import persister as saves_module
from megatron_flashckpt.agent.commit_thread import Committer
from megatron_flashckpt.agent.persister import Saves
from megatron_flashckpt.agent.settings import settings_of
from megatron_flashckpt.agent.slot_table import RankSlots
from megatron_flashckpt.agent.state import AgentOptions, Node, Trainer
from megatron_flashckpt.config import Config
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotState
from tests.support.trainer import PATIENCE_S, new_save_id


@pytest.fixture
def rank() -> Iterator[Trainer]:
    slab = Slab.create(2, 0, 100, "0")
    slab.slots[0].set_header(SlotHeader(SlotState.KEPT, 7, new_save_id(), 0, 100))
    made = Trainer()
    made.slots = RankSlots(slab)
    yield made
    slab.close()


@pytest.fixture
def node(tmp_path: Path, rank: Trainer) -> Node:
    made = Node(AgentOptions(root=str(tmp_path), **msgspec.structs.asdict(settings_of(Config()))))
    made.ranks[3] = rank
    return made


@pytest.fixture
def saves(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Saves]:
    def fail(*_: object) -> tuple[str, ...]:
        raise MemoryError

    monkeypatch.setattr(saves_module, "digest_slot", fail)
    made = Saves(node, Committer(node))
    yield made
    made.close()


def test_a_memory_only_save_gets_a_result_even_if_its_digest_fails(
    node: Node, rank: Trainer, saves: Saves
) -> None:
    assert rank.slots is not None
    with node.changed:
        saves.accept_slot(3, 0)
        assert node.changed.wait_for(lambda: bool(rank.unreported), PATIENCE_S)
        (outcome,) = rank.unreported
        assert not rank.slots.busy
        assert not rank.awaited
    assert (outcome.iteration, outcome.kept, outcome.failed_ranks) == (7, False, (3,))
    assert "rank 3: not digested in host memory: MemoryError" in (outcome.error or "")


def test_the_log_names_a_slot_that_cannot_be_digested(
    node: Node, rank: Trainer, saves: Saves, caplog: pytest.LogCaptureFixture
) -> None:
    slots = rank.slots
    assert slots is not None
    with node.changed:
        saves.digest_unread(rank)
        assert slots.is_digesting
        assert node.changed.wait_for(lambda: not slots.is_digesting, PATIENCE_S)
    assert "iteration 7 was not digested" in caplog.text
