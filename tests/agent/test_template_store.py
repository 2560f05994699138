"""Templates: one rank computes, and the other ranks that need the same template wait."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_flashckpt.agent import request_handler, template_store
from megatron_flashckpt.agent.template_store import TemplateStore
from megatron_flashckpt.memory.slot import SlotMeta, decoded_meta
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.trainer import PATIENCE_S, new_save_id

COMPUTE = (None, False)
WAIT = (None, True)


@pytest.fixture
def store() -> TemplateStore:
    return TemplateStore(threading.Condition())


def get(store: TemplateStore, rank: int, wait_s: float = 0.0) -> tuple[bytes | None, bool]:
    with store._changed:
        return store.get(rank, "a", wait_s)


def test_the_first_rank_computes_a_template_and_the_others_wait(store: TemplateStore) -> None:
    assert [get(store, rank) for rank in (0, 1, 2)] == [COMPUTE, WAIT, WAIT]
    assert get(store, 0) == COMPUTE, "the rank that computes does not wait"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get, store, 1, 60.0)
        with store._changed:
            store.put("a", b"template")
        assert waiting.result(50.0) == (b"template", False)
    assert get(store, 2) == (b"template", False)


def test_one_other_rank_computes_if_the_first_takes_too_long(
    store: TemplateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_store, "_COMPUTING_S", 0.0)
    assert get(store, 0) == COMPUTE
    monkeypatch.setattr(template_store, "_COMPUTING_S", 60.0)
    assert [get(store, rank) for rank in (1, 2)] == [COMPUTE, WAIT]


def test_another_rank_computes_the_template_of_a_rank_that_hung_up(node: Node, root: Path) -> None:
    first, second = node.trainer(root, 0, 2), node.trainer(root, 1, 2)
    assert first.client.fetch_template("a") is None
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(second.client.fetch_template, "a")
        first.hang_up()
        assert answer.result(template_store._COMPUTING_S * 0.8) is None


def test_no_rank_waits_while_the_agent_decodes_a_staged_slot(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding, may_end = threading.Event(), threading.Event()

    def slow(encoded: bytes, index: int) -> SlotMeta:
        decoding.set()
        assert may_end.wait(PATIENCE_S)
        return decoded_meta(encoded, index)

    # Two modules call the decoder.
    monkeypatch.setattr(request_handler, "decoded_meta", slow)
    monkeypatch.setattr("megatron_flashckpt.memory.slot.decoded_meta", slow)
    with agent_here(node, root), ThreadPoolExecutor(2) as pool:
        first, second = node.trainer(root, 0, 2), node.trainer(root, 1, 2)
        staging = pool.submit(first.stage, 1, new_save_id())
        assert decoding.wait(PATIENCE_S)
        try:
            pool.submit(second.client.poll, 0.0).result(PATIENCE_S / 2)
            assert not staging.done(), "the agent is still decoding the slot metadata"
        finally:
            may_end.set()
        staging.result(PATIENCE_S)
