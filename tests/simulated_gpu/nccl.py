"""Collectives of CUDA tensors between ranks with simulated nodes; gloo transfers the bytes.

`nccl_over_gloo` makes `torch.distributed` behave as with the NCCL backend.

Rules, and their sources:
- A synchronous collective returns when it is enqueued, not when it is done (torch docs,
  "Distributed communication package", "Synchronous and asynchronous collective operations"). It
  runs on a stream of its group, which waits for the caller's current stream, and the current
  stream waits for it (`torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`, `syncStream` and
  `WorkNCCL::synchronizeStream`).
- Tensors in host memory are refused: "No backend type associated with device type cpu".
- Messages of some ranks of a group may not be its first call (torch docs, `batch_isend_irecv`).
- The first message between two ranks of a group connects them. The connection's buffers come from
  the driver, not from torch's allocator, and stay until the group is destroyed (NCCL User Guide,
  "Environment Variables", NCCL_BUFFSIZE and NCCL_RUNTIME_CONNECT; `ncclCommDestroy`).

Pessimistic: results always arrive late, when the streams reach them. Not simulated: a collective
that a rank never joins, and asynchronous collectives.
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

#: Device memory of a rank's connection to one other rank.
CONNECTION_NBYTES = 4096


class Nccl:
    """NCCL of one rank. A group is a `ProcessGroup`, or None for all ranks."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._streams: dict[Any, Stream] = {}
        self._connections: dict[Any, list[Block]] = {}
        self._gloo = {name: getattr(dist, name) for name in (*_REPLACED, _GATHER_SINGLE)}
        self._connected: set[Any] = set()
        self.peers: dict[Any, set[int]] = {}
        """Ranks with which this rank has exchanged messages, by group."""
        self.round_nbytes: list[int] = []
        """Bytes of every batch of messages: the larger of sent and received bytes."""

    def get_backend(self, group: Any = None) -> str:
        return "nccl"

    def _gather_single(self, received: Any, sent: Any, group: Any = None) -> None:
        def carry(source: list[Any], target: list[Any]) -> None:
            self._gloo[_GATHER_SINGLE](*target, *source, group=group)

        self._run(group, [sent], [received], carry)

    def broadcast(self, tensor: Any, src: int, group: Any = None) -> None:
        def carry(source: list[Any], target: list[Any]) -> None:
            self._gloo["broadcast"](target[0].copy_(source[0]), src, group)

        self._run(group, [tensor], [tensor], carry)

    def all_reduce(self, tensor: Any, op: Any, group: Any = None) -> None:
        def carry(source: list[Any], target: list[Any]) -> None:
            self._gloo["all_reduce"](target[0].copy_(source[0]), op, group)

        self._run(group, [tensor], [tensor], carry)

    def batch_isend_irecv(self, operations: list[Any]) -> list[Any]:
        """Send and receive; results arrive late, and there is no work object to wait for."""
        (group,) = {operation.group for operation in operations}
        if group not in self._connected:
            raise RuntimeError("only some ranks may be in the first call of a group")
        sends = [entry for entry in operations if entry.op is dist.isend]
        receives = [entry for entry in operations if entry.op is dist.irecv]
        self.peers[group] = self.peers.get(group, set()) | {entry.peer for entry in operations}
        allocator = self._node.current_device().allocator
        blocks = self._connections.setdefault(group, [])
        while len(blocks) < len(self.peers[group]):
            blocks.append(allocator.allocate_outside(CONNECTION_NBYTES))
        sizes = [sum(entry.tensor.nbytes for entry in batch) for batch in (sends, receives)]
        self.round_nbytes.append(max(sizes))

        def carry(source: list[Any], target: list[Any]) -> None:
            hosts = [*zip(sends, source, strict=True), *zip(receives, target, strict=True)]
            for work in self._gloo["batch_isend_irecv"](
                [dist.P2POp(entry.op, host, entry.peer, group) for entry, host in hosts]
            ):
                work.wait()

        self._run(
            group, [entry.tensor for entry in sends], [entry.tensor for entry in receives], carry
        )
        return []  # a work's `wait` makes only the current stream wait, which `_run` has done

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
        self._connected.add(group or dist.group.WORLD)
        device = self._node.devices[[*sent, *received][0].index]
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


#: Renamed in torch 2.13.
_GATHER_SINGLE = (
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
)
_REPLACED = (
    "broadcast",
    "all_reduce",
    "batch_isend_irecv",
    "get_backend",
    "destroy_process_group",
)


@contextlib.contextmanager
def nccl_over_gloo(node: Node) -> Iterator[Nccl]:
    nccl = Nccl(node)
    with contextlib.ExitStack() as stack:
        for name in _REPLACED:
            stack.enter_context(mock.patch.object(dist, name, getattr(nccl, name)))
        stack.enter_context(mock.patch.object(dist, _GATHER_SINGLE, nccl._gather_single))
        yield nccl
