"""PyTorch's `torch.distributed.checkpoint`: `save`, and `async_save` by a thread."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.systems.base import COMMON, System
from benchmarks.workload import State


class DCP(System):
    """DTensors that are sharded along the first dimension, as by FSDP.

    Asynchronous saves keep one stager and its shared memory, without pinning, because there is no
    GPU. The thread uses a gloo group of its own, so that its collectives do not interfere with
    those of training.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.background = self.options["kind"] != "sync"
        self._stager: DefaultStager | None = None
        self._staged: dict[int, Future[Any]] = {}
        self._written: dict[int, Future[Any]] = {}

    def setup(self, state: State) -> None:
        self._group = dist.new_group(backend="gloo")
        if self.background:
            self._stager = DefaultStager(StagingOptions(False, True, False, False))

    def save(self, step: int, state: State) -> bool:
        content = {**self._sharded(state), "common": {**COMMON, "iteration": step}}
        writer = FileSystemWriter(self.directory(step), thread_count=self.options["threads"])
        planner = DefaultSavePlanner(enable_plan_caching=self.options.get("cached", False))
        if self._stager is None:
            dcp.save(content, storage_writer=writer, planner=planner, process_group=self._group)
            return True
        # The documentation requires that the last save is complete.
        for earlier in list(self._written):
            self.wait(earlier)
        response = dcp.async_save(
            content,
            storage_writer=writer,
            planner=planner,
            async_stager=self._stager,
            process_group=self._group,
        )
        if isinstance(response, Future):
            self._written[step] = response
        else:
            self._written[step] = response.upload_completion
            self._staged[step] = response.staging_completion
        return True

    def _sharded(self, state: State) -> dict[str, DTensor]:
        mesh = init_device_mesh("cpu", (self.world_size,))
        return {
            name: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
            for name, tensor in state.tensors.items()
        }

    def settle(self, step: int) -> None:
        if (staged := self._staged.pop(step, None)) is not None:
            staged.result()

    def poll(self, step: int) -> bool:
        return step not in self._written or self._written[step].done()

    def wait(self, step: int) -> None:
        if (written := self._written.pop(step, None)) is not None:
            written.result()

    def latest(self) -> int:
        steps = [int(path.parent.name[5:]) for path in self.root.glob("iter_*/.metadata")]
        return max(steps, default=-1)

    def load(self, state: State) -> int:
        step = self.latest()
        dcp.load(self._sharded(state), checkpoint_id=self.directory(step))
        return step

    def close(self, *, keep: bool) -> None:
        if self._stager is not None:
            self._stager.close()
