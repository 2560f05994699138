"""Collectives of CUDA tensors between ranks that have simulated nodes; gloo carries the bytes.

`nccl_over_gloo` has `torch.distributed` say and do what it does with the NCCL backend.

Rules, and their sources:
- A synchronous collective returns when it is enqueued, not when it is done (torch docs,
  "Distributed communication package", "Synchronous and asynchronous collective operations"). It
  runs on a stream of its group, which waits for the caller's current stream, and the current
  stream waits for it (`torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`, `syncStream` and
  `WorkNCCL::synchronizeStream`).
- Tensors in host memory are refused: "No backend type associated with device type cpu".
- The first message between two ranks of a group connects them. The connection's buffers come from
  the driver, not from torch's allocator, and stay until the group is destroyed (NCCL User Guide,
  "Environment Variables", NCCL_BUFFSIZE and NCCL_RUNTIME_CONNECT; `ncclCommDestroy`).

Pessimistic: results always arrive late, when the streams get to them. Not simulated: a collective
that a rank never joins, and asynchronous ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.simulated_gpu.allocator import Block
from tests.simulated_gpu.node import Node, Stream
from tests.simulated_gpu.tensor import DeviceTensor

#: Device memory that a rank's connection to one other rank takes.
CONNECTION_NBYTES = 4096


class Nccl:
    """NCCL of one rank. A group is a `ProcessGroup`; None: all ranks."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._streams: dict[Any, Stream] = {}
        self._connections: dict[Any, list[Block]] = {}
        self._gloo = {name: getattr(dist, name) for name in _REPLACED}
        self.round_nbytes: list[int] = []
        """Bytes of the larger buffer of every all-to-all."""

    def get_backend(self, group: Any = None) -> str:
        return "nccl"

    def all_gather(self, received: list[Any], sent: Any, group: Any = None) -> None:
        def carry(source: list[Any], target: list[Any]) -> None:
            self._gloo["all_gather"](target, *source, group=group)

        self._run(group, [sent], received, carry)

    def broadcast(self, tensor: Any, src: int, group: Any = None) -> None:
        def carry(source: list[Any], target: list[Any]) -> None:
            self._gloo["broadcast"](target[0].copy_(source[0]), src, group)

        self._run(group, [tensor], [tensor], carry)

    def all_reduce(self, tensor: Any, op: Any, group: Any = None) -> None:
        def carry(source: list[Any], target: list[Any]) -> None:
            self._gloo["all_reduce"](target[0].copy_(source[0]), op, group)

        self._run(group, [tensor], [tensor], carry)

    def all_to_all_single(
        self, received: Any, sent: Any, out_sizes: Any, in_sizes: Any, group: Any = None
    ) -> None:
        def carry(source: list[Any], target: list[Any]) -> None:
            self._gloo["all_to_all_single"](*target, *source, out_sizes, in_sizes, group=group)

        self.round_nbytes.append(max(received.nbytes, sent.nbytes))
        if group not in self._connections:
            allocator = self._node.current_device().allocator
            others = dist.get_world_size(group) - 1
            self._connections[group] = [
                allocator.allocate_outside(CONNECTION_NBYTES) for _ in range(others)
            ]
        self._run(group, [sent], [received], carry)

    def destroy_process_group(self, group: Any = None) -> None:
        if group in self._streams:
            self._streams.pop(group).synchronize()
        self._connections.pop(group, None)
        self._gloo["destroy_process_group"](group)

    def _run(
        self,
        group: Any,
        sent: list[Any],
        received: list[Any],
        carry: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
    ) -> None:
        """Enqueue a collective on the group's stream; `carry` moves host tensors over gloo."""
        if not all(isinstance(tensor, DeviceTensor) for tensor in (*sent, *received)):
            raise RuntimeError("No backend type associated with device type cpu")
        device = self._node.devices[sent[0].index]
        current = self._node.current_stream(device.index)
        stream = self._streams.setdefault(group, device.pooled_stream(-1))
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            source = [tensor.cpu() for tensor in sent]
        target = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in received]
        carry(source, target)
        for tensor, arrived in zip(received, target, strict=True):
            stream.enqueue(functools.partial(tensor.backing.copy_, arrived))
        current.wait_stream(stream)


_REPLACED = (
    "all_gather",
    "broadcast",
    "all_reduce",
    "all_to_all_single",
    "get_backend",
    "destroy_process_group",
)


@contextlib.contextmanager
def nccl_over_gloo(node: Node) -> Iterator[Nccl]:
    """Have this rank's gloo process group be one of NCCL inside the context."""
    nccl = Nccl(node)
    with contextlib.ExitStack() as stack:
        for name in _REPLACED:
            stack.enter_context(mock.patch.object(dist, name, getattr(nccl, name)))
        yield nccl
