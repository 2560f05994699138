"""Differences of `EagerNode` and `RankNode` from `Node`, and errors that they cannot detect."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.simulated_gpu import Node, simulated_gpus
from tests.simulated_gpu.eager import EagerNode, on_device
from tests.simulated_gpu.test_conformance import begin, locked
from tests.support.trainer import PATIENCE_S, eventually

REPO = Path(__file__).resolve().parents[2]


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


_RANK = """
import os, sys, threading
import torch

assert "tests" not in sys.modules  # Megatron has a package of that name
assert not [name for name in sys.modules if name.startswith("megatron_flashckpt")]
assert sys.path[: len(PLAIN)] == PLAIN
assert torch.cuda.device_count() == 2
torch.cuda.set_device(1)
stream = torch.cuda.Stream()
assert isinstance(stream, torch.cuda.Stream) and stream.device_index == 1
seen = []
other = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
other.start()
other.join()
assert seen == [0]
if (child := os.fork()) == 0:
    torch.cuda.Stream().synchronize()  # the child inherits no threads and makes new ones
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_cpu_rank_finds_this_node_from_any_directory(tmp_path: Path) -> None:
    """`cpu_cuda` finds the node by its own path; `sys.path` and `tests` stay Megatron's."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPO / "tests/cpu_megatron"),
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    # An editable install of the package also adds the repository to sys.path.
    plain = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys.path)"],
        check=True,
        cwd=tmp_path,
        env={**environment, "CPU_CUDA_SHIM": "0"},
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    script = f"PLAIN = {plain}{_RANK}"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env=environment)
