"""Freeing of a large slab, which takes seconds: the agent answers all ranks meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.agent import client
from megatron_flashckpt.memory.slab import Slab
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.trainer import PATIENCE_S, FakeTrainer, eventually, new_save_id

#: Much less than a blocked agent needs, and more than any answer takes.
ANSWER_S = 5.0


class SlowFreeing:
    """Lets `Slab.close` wait, as the kernel does when it frees many pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way = 0
        self.go_on = threading.Event()
        test, close = threading.current_thread(), Slab.close

        def slow_close(slab: Slab) -> None:
            if threading.current_thread() is not test:
                self.under_way += 1
                assert self.go_on.wait(PATIENCE_S)
            close(slab)

        monkeypatch.setattr(Slab, "close", slow_close)
        # The agent runs in this process, which a client must not kill.
        monkeypatch.setattr(client, "end_agent", lambda *_: None)


@pytest.fixture
def freeing(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowFreeing]:
    made = SlowFreeing(monkeypatch)
    yield made
    made.go_on.set()


FIRST, SECOND = new_save_id(), new_save_id()


def replace_slab(trainer: FakeTrainer) -> None:
    """Let the next save attach another slab."""
    assert trainer.slab is not None
    trainer.slab.close()
    trainer.slab = None


def test_ranks_are_answered_while_a_replaced_slab_is_freed(
    node: Node, root: Path, freeing: SlowFreeing
) -> None:
    with agent_here(node, root):
        config = node.config(answer_timeout_s=ANSWER_S)
        trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
        for trainer in trainers:
            trainer.stage(1, FIRST)
        assert [trainer.outcome().error for trainer in trainers] == [None, None]
        replace_slab(trainers[0])
        trainers[0].stage(2, SECOND)
        eventually("the former slab is being freed", lambda: freeing.under_way == 1)
        trainers[1].stage(2, SECOND)
        assert [trainer.outcome().error for trainer in trainers] == [None, None]
        assert freeing.under_way == 1, "the replaced slab is still being freed"
        freeing.go_on.set()
