"""Machine that a section runs on: real GPUs, or a simulated node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, TypeVar
from unittest import mock

import torch

from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.save import stager as stager_module
from megatron_flashckpt.save.stager import Stager
from tests.simulated_gpu import Node

T = TypeVar("T")

#: The simulated node; None on a machine with a GPU. Set by `section.py` before a section runs.
simulated_node: Node | None = None
#: Time at which the driver kills this section, on the monotonic clock.
deadline = float("inf")

#: Assumed cycles per second of `torch.cuda._sleep`; today's GPUs run at 1.4 to 2 GHz.
_CLOCK_HZ = 1.7e9


def seconds_left() -> float:
    return deadline - time.monotonic()


def pick(on_gpu: T, simulated: T) -> T:
    """Return `on_gpu` on a GPU, and `simulated` (usually a smaller size) on the simulated node."""
    return on_gpu if simulated_node is None else simulated


def keep_busy(seconds: float) -> None:
    """Keep the current stream busy for about `seconds`; the caller continues at once."""
    if simulated_node is None:
        torch.cuda._sleep(int(seconds * _CLOCK_HZ))
    else:
        simulated_node.current_stream().enqueue(lambda: time.sleep(seconds))


@contextlib.contextmanager
def staging(slots: int, nbytes: int, *, part_nbytes: int) -> Iterator[tuple[Slab, Stager]]:
    """Yield a populated slab, whose slots hold `nbytes` each, and its stager.

    Args:
        part_nbytes: size of the parts of a copy on the simulated node.
    """
    part = pick(stager_module.PART_NBYTES, part_nbytes)
    with mock.patch.object(stager_module, "PART_NBYTES", part):
        slab, stager = Slab.create(slots, 4096, nbytes, "gpu-check"), Stager()
        slab.populate()
        stager.use(slab, device=torch.cuda.current_device())
        yield slab, stager
        stager.close()
        slab.close()


def is_copying(stager: Stager) -> bool:
    job = stager._current
    return job is not None and not job.copied.is_set()


@contextlib.contextmanager
def captured(stream: torch.cuda.Stream) -> Iterator[Any]:
    """Capture the work of the context on `stream` into a graph, in global mode.

    Yields an object whose `replay` runs it. In global mode an unsafe call of any other thread
    invalidates the capture, unless that thread is in relaxed mode.
    """
    if simulated_node is not None:
        with torch.cuda.stream(stream), simulated_node.capture("global") as simulated:
            yield simulated
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="global"):
        yield graph
