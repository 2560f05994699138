"""Templates that nodes share through the job's store; if it fails, each rank computes its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from megatron_flashckpt.save import shared_templates
from megatron_flashckpt.save.shared_templates import _JobStore


class Nodes:
    """The store of a job with one rank per node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.store = dist.HashStore()
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: self.store)

    def rank(self, number: int) -> _JobStore:
        self._monkeypatch.setattr(dist, "get_rank", lambda: number)
        return _JobStore("run")


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(monkeypatch)


def test_one_rank_computes_a_template_and_the_others_wait(nodes: Nodes) -> None:
    first, second = nodes.rank(0), nodes.rank(1)
    assert first.fetch("a") is None
    got: list[bytes | None] = []
    waiting = threading.Thread(target=lambda: got.append(second.fetch("a")), daemon=True)
    waiting.start()
    first.publish("a", b"template" * 1000)
    waiting.join(60.0)
    assert got == [b"template" * 1000]
    assert second.fetch("b") is None, "this rank computes another template"


@pytest.mark.parametrize("why", ["too large", "takes too long", "invalid"])
def test_a_rank_that_gets_no_template_computes_it(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    first, second = nodes.rank(0), nodes.rank(1)
    assert first.fetch("a") is None
    if why == "too large":
        first.publish("a", os.urandom(2 * shared_templates._MOST_NBYTES))
    elif why == "takes too long":
        monkeypatch.setattr(shared_templates, "_COMPUTING_S", 0.01)
    else:
        nodes.store.set("run/a", "not compressed")
    assert second.fetch("a") is None


def test_if_the_store_fails_each_rank_computes_its_template(nodes: Nodes) -> None:
    class UnreachableStore:
        def __getattr__(self, name: str) -> object:
            raise dist.DistNetworkError("connection closed")

    nodes.store = UnreachableStore()  # type: ignore[assignment]
    rank = nodes.rank(0)
    assert rank.fetch("a") is None
    rank.publish("a", b"template")


def test_a_hanging_store_costs_one_wait(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch's client waits forever for a store whose machine is gone or suspended."""
    monkeypatch.setattr(shared_templates, "_COMPUTING_S", 0.01)
    monkeypatch.setattr(shared_templates, "_ANSWER_S", 0.01)
    answers = threading.Event()
    called: list[str] = []

    class HangingStore:
        def __getattr__(self, name: str) -> Callable[..., None]:
            called.append(name)
            return lambda *_: answers.wait(60.0) and None

    nodes.store = HangingStore()  # type: ignore[assignment]
    rank = nodes.rank(0)
    assert rank.fetch("a") is None
    rank.publish("a", b"template")
    answers.set()
    assert called == ["compare_set"]
    assert "the job's store did not answer within" in caplog.text
