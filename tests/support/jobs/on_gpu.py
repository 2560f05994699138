"""Copies the checkpoints of a CPU rank from the rank's simulated GPU; for `traced_gpt.py`.

Megatron computes on host tensors. The copy thread receives a save's late copies as tensors of the
device that the rank has set, in the same memory (`tests/simulated_gpu/eager.py`). The side state
stays in host memory, as on a real rank.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import cpu_cuda
import torch

from megatron_flashckpt.memory import cuda
from megatron_flashckpt.memory.runs import Copy
from megatron_flashckpt.save import stager
from megatron_flashckpt.save.stager import Stager
from tests.simulated_gpu import DeviceTensor
from tests.simulated_gpu.eager import on_device

#: Size of the parts in which copies are requested: dozens of parts for the tiny model.
PART_NBYTES = 32 * 1024
#: While training computes, each part takes 250 ms: no save ends before the next step is due.
SLOW = PART_NBYTES / 0.25
#: While training waits, each part takes 5 ms, so a step that does not wait changes what is copied.
FAST = PART_NBYTES / 0.005


def install(trace: Callable[..., None], iteration: Callable[[], int]) -> None:
    """Put the simulated GPU between Megatron's tensors and the slab.

    Args:
        trace: appends an event to the rank's trace.
        iteration: returns the iteration that is being trained.
    """
    node = cpu_cuda.node
    DeviceTensor.node, node.calls = node, []
    cuda.current_device = torch.cuda.current_device
    cuda.runtime_library = lambda: node.runtime
    stager.PART_NBYTES = PART_NBYTES
    stage, before_change, wait = Stager.stage, Stager.before_change, Stager.wait

    def staged_on_device(
        self: Stager,
        tensors: list[torch.Tensor],
        early: list[Copy],
        late: list[Copy],
        *args: Any,
        **more: Any,
    ) -> Any:
        self.wait()
        node.d2h_bytes_per_s = SLOW
        index = torch.cuda.current_device()
        copied_late = {copy.source for copy in late}
        placed = [
            on_device(tensor, index) if number in copied_late else tensor
            for number, tensor in enumerate(tensors)
        ]
        return stage(self, placed, early, late, *args, **more)

    def wait_at_full_speed(self: Stager, *args: Any) -> bool:
        if self._current is not None:
            node.d2h_bytes_per_s = FAST
        return wait(self, *args)

    def traced_change(self: Stager) -> None:
        job = self._current
        if job is not None:
            trace(event="change", iteration=iteration(), under_way=not job.copied.is_set())
            node.d2h_bytes_per_s = FAST
        before_change(self)

    Stager.stage, Stager.before_change, Stager.wait = (
        staged_on_device,
        traced_change,
        wait_at_full_speed,
    )


def report(trace: Callable[..., None], stager: Stager) -> None:
    """Trace the devices on which each thread made its calls, the page-locked memory, and how often
    torch's cached GPU memory was returned to the driver.

    Waits for copies that are under way.
    """
    stager.wait()
    devices: dict[str, set[int]] = collections.defaultdict(set)
    copies: dict[str, int] = collections.Counter()
    for call in cpu_cuda.node.calls:
        if call.name != "set_device":  # recorded with the thread's previous device
            devices[call.thread].add(call.device)
        copies[call.thread] += call.name == "copy to host"
    locked = [[thread, device] for _, thread, device in cpu_cuda.node.runtime.registered_by]
    trace(
        event="gpu",
        devices={thread: sorted(called_on) for thread, called_on in devices.items()},
        copies=copies,
        locked=locked,
        emptied=sum(call.name == "empty_cache" for call in cpu_cuda.node.calls),
    )
