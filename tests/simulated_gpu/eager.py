"""Node for programs that compute eagerly on host tensors, as Megatron does on CPU ranks.

The default stream of each device works in the calling thread: its work is done before the call
returns, and a wait of that stream blocks the thread. So the program's computation, which uses no
stream, is in order with the default stream. All other streams work later, as on any simulated node.

The node detects copies on a side stream that read a tensor after the program has changed it. It
also detects an event or a stream of the wrong device, and a thread that has not set its device. It
cannot detect work that comes too early: the program's results are complete when a side stream reads
them, with or without a wait for the default stream.
"""

from __future__ import annotations

import collections
import functools
import os
import threading
from typing import Any

import torch

from tests.simulated_gpu.node import Device, Node, Stream, Work
from tests.simulated_gpu.runtime import Runtime
from tests.simulated_gpu.tensor import DeviceTensor

_MEMORY_NBYTES = 64 << 20


class CallerStream(Stream):
    """Stream whose work the calling thread does; a held device blocks that thread."""

    def __init__(self, gpu: Device) -> None:
        self._turn = threading.RLock()
        """Lock of the working thread, because the work of one stream never overlaps."""
        super().__init__(gpu)

    def _start(self) -> None:
        """Start no thread."""

    def _append(self, work: Work | None) -> None:
        if work is not None:
            with self._turn:
                self._do(work)

    def enqueue_to_host(self, nbytes: int, copy: Work) -> None:
        if self.capture is not None:
            super().enqueue_to_host(nbytes, copy)
            return
        with self.gpu.to_host.changed:
            work = self.gpu.to_host.ask(self, nbytes, copy)
        self._append(work)  # without the lock, which the copies ahead of this one need


class EagerNode(Node):
    """Node whose default streams work in the calling thread."""

    def make_default_stream(self, device: Device) -> Stream:
        return CallerStream(device)


class RankNode(EagerNode):
    """Node of one rank's process, with LOCAL_WORLD_SIZE devices.

    The devices are made at their first use, and again in a forked process, which inherits no
    threads. The node keeps no list of its many calls; a test can set `calls` to a list.
    """

    def __init__(self) -> None:
        super().__init__(0)
        del self.devices
        self.calls = collections.deque(maxlen=0)  # type: ignore[assignment]
        self.runtime = Runtime(self)

    @functools.cached_property
    def devices(self) -> list[Device]:  # type: ignore[override]
        count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return [Device(self, index, _MEMORY_NBYTES) for index in range(count)]


class _HostBlock:
    """Replacement of a device's memory block; the tensor's own reference keeps the host memory."""

    def record_stream(self, stream: Stream) -> None:
        """Record nothing, because the allocator does not own the memory."""


def on_device(host: torch.Tensor, index: int) -> Any:
    """Return a tensor of device `index` that shares the memory of a host tensor.

    Operations on the host tensor change both tensors at once. Operations on the returned tensor are
    enqueued on the current stream of its device.
    """
    return DeviceTensor(host.detach(), _HostBlock(), index)  # type: ignore[arg-type]
