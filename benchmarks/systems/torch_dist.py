"""Megatron's own `--ckpt-format torch_dist --async-save --ckpt-fully-parallel-save`."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from benchmarks.systems.base import COMMON, TRACKER, System
from benchmarks.workload import State


class TorchDist(System):
    """Saves as Megatron's training loop does with `--ckpt-assume-constant-structure`.

    Each save forks two writer processes per rank. As in Megatron, only the first save checks the
    access integrity.
    """

    def setup(self, state: State) -> None:
        strategy = TorchDistSaveShardedStrategy(
            "torch_dist", 1, thread_count=2, cached_metadata=True
        )
        self._strategy = FullyParallelSaveStrategyWrapper(strategy, None, True)
        self._queue = AsyncCallsQueue(persistent=False)
        # Newer releases use nvidia-resiliency-ext by default.
        known = inspect.signature(dist_checkpointing.save).parameters
        self._strategy_argument = {"async_strategy": "mcore"} if "async_strategy" in known else {}
        self._done = -1
        self._checked = False

    def save(self, step: int, state: State) -> bool:
        if self.rank == 0:
            self.make_directory(step)
        dist.barrier()
        request = dist_checkpointing.save(
            self._sharded(state, step),
            str(self.directory(step)),
            self._strategy,
            validate_access_integrity=not self._checked,
            async_sharded_save=True,
            **self._strategy_argument,
        )
        self._checked = True
        request.add_finalize_fn(lambda: self._finish(step))
        self._queue.schedule_async_request(request)
        return True

    def _finish(self, step: int) -> None:
        self._done = step
        if self.rank == 0:
            (self.root / TRACKER).write_text(str(step))

    def _sharded(self, state: State, step: int) -> dict[str, Any]:
        sharded = {
            name: ShardedTensor.from_rank_offsets(name, tensor, (0, self.rank, self.world_size))
            for name, tensor in state.tensors.items()
        }
        return {**sharded, **COMMON, "iteration": step}

    def poll(self, step: int) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False)
        return self._done >= step

    def wait(self, step: int) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def load(self, state: State) -> int:
        step = self.latest()
        loaded = dist_checkpointing.load(self._sharded(state, step), str(self.directory(step)))
        for name, tensor in state.tensors.items():
            if loaded[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(loaded[name])
        return step

    def close(self, *, keep: bool) -> None:
        if hasattr(self, "_queue"):
            self._queue.close()
