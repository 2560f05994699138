"""Differences of `EagerNode` and `RankNode` from `Node`, and errors that they cannot detect."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.simulated_gpu import Node, simulated_gpus
from tests.simulated_gpu.eager import EagerNode, on_device
from tests.simulated_gpu.test_conformance import begin, locked
from tests.support.trainer import PATIENCE_S, eventually


@pytest.fixture
def node() -> Iterator[Node]:
    with simulated_gpus(2, kind=EagerNode) as node:
        yield node


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Lets a busy stream continue."""
    go = threading.Event()
    yield go
    go.set()


def test_a_wait_of_the_default_stream_blocks_the_calling_thread(
    node: Node, go: threading.Event
) -> None:
    side = torch.cuda.Stream()
    side.enqueue(go.wait)
    event = side.record_event()
    waiting = begin(lambda: torch.cuda.current_stream().wait_event(event))
    eventually("the wait", lambda: "Stream.wait_event" in {call.name for call in node.calls})
    assert not waiting.done()
    go.set()
    waiting.result(PATIENCE_S)
    assert event.query()


def test_work_of_two_threads_on_the_default_stream_does_not_overlap(
    node: Node, go: threading.Event
) -> None:
    begun = threading.Event()
    stream = torch.cuda.default_stream(0)

    def long_work() -> None:
        begun.set()
        go.wait()

    first = begin(lambda: stream.enqueue(long_work))
    assert begun.wait(PATIENCE_S)
    second = begin(stream.record_event)
    assert not second.done()
    go.set()
    first.result(PATIENCE_S)
    assert second.result(PATIENCE_S).query()


def test_work_that_fails_breaks_the_device(node: Node) -> None:
    def fail() -> None:
        raise ValueError("no such index")

    torch.cuda.current_stream().enqueue(fail)
    with pytest.raises(torch.AcceleratorError, match="ValueError: no such index"):
        torch.cuda.synchronize()


def test_a_copy_to_the_host_waits_for_earlier_copies_of_side_streams(
    node: Node, go: threading.Event
) -> None:
    """The late copy reads what the program has changed: the purpose of this node."""
    weight, target, side = torch.zeros(1024), locked(4096), torch.cuda.Stream()
    side.enqueue(go.wait)
    with torch.cuda.stream(side):
        target.view(torch.float32).copy_(on_device(weight, 0), non_blocking=True)
    weight.add_(1.0)
    small = begin(lambda: torch.ones(1, device="cuda").item())
    eventually("the copy", lambda: node.devices[0].to_host.queued_nbytes == 4096 + 4)
    assert not small.done()
    assert not side.query()
    go.set()
    assert small.result(PATIENCE_S) == 1.0
    assert torch.equal(target.view(torch.float32), torch.ones(1024))
