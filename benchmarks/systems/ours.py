"""This project: `Checkpointer`, driven as by Megatron's training loop.

A save runs the whole code path. It enumerates and plans the pieces with the code for Megatron,
stages them, and hands them to an agent process that this job starts. The optimizer's step waits for
remaining copies through the hook that the save has installed. The weights are parameters of a
module with a `sharded_state_dict`, as in Megatron's modules. Masters and moments belong to
Megatron's `Float16OptimizerWithFloat16Params` around torch's Adam. Both use the tensors of the
workload.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from benchmarks.systems.base import COMMON, System
from benchmarks.workload import State
from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.catalog import stored_checkpoint
from megatron_flashckpt.config import AgentConfig, Config
from megatron_flashckpt.file_format.shard_file import new_chunk_digest
from megatron_flashckpt.load import loader, slot_chunks
from megatron_flashckpt.load.load_policy import LoadPolicy
from megatron_flashckpt.load.load_request import LoadRequest
from megatron_flashckpt.load.memory_checkpoints import held_in_memory
from megatron_flashckpt.load.memory_source import open_memory
from megatron_flashckpt.load.storage_source import open_stored
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.size_estimate import expect
from megatron_flashckpt.save.checkpointer import Checkpointer, SaveRequest
from megatron_flashckpt.save.gc_pause import gc_paused
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.tracing import Recorder

#: Replacement of Megatron's arguments.
_ARGS = argparse.Namespace(**COMMON)


class Weights(torch.nn.Module):
    """Weights of the workload, sharded along their first dimension over all ranks."""

    def __init__(self, weights: dict[str, torch.Tensor], rank: int, world_size: int) -> None:
        super().__init__()
        self._cut = (0, rank, world_size)
        self._names = list(weights)
        self._weights = torch.nn.ParameterList(weights.values())

    def sharded_state_dict(self) -> dict[str, ShardedTensor]:
        return {
            name: ShardedTensor.from_rank_offsets(name, weight, self._cut)
            for name, weight in zip(self._names, self._weights, strict=True)
        }


class MixedPrecision(Float16OptimizerWithFloat16Params):
    """Megatron's optimizer around existing tensors; a step does not change them."""

    def __init__(self, weights: Weights, state: State) -> None:
        masters = [torch.nn.Parameter(master) for master in state.of("master").values()]
        self.float16_groups = [list(weights.parameters())]
        self.fp32_from_float16_groups = [masters]
        self.fp32_from_fp32_groups = [[]]
        self.grad_scaler = None
        self.is_stub_optimizer = False
        self.optimizer = torch.optim.Adam(masters)
        moments = zip(
            masters, state.of("exp_avg").values(), state.of("exp_avg_sq").values(), strict=True
        )
        for master, first, second in moments:
            self.optimizer.state[master] = {
                "step": torch.tensor(1.0),
                "exp_avg": first,
                "exp_avg_sq": second,
            }

    def step(self) -> None:
        self.optimizer.step()


class Ours(System):
    """This project with its defaults, except for the option `staging`."""

    memory_survives = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._config = Config(
            runtime_dir=str(self.root / "run"),
            staging=self.options.get("staging", "deferred"),
            agent=AgentConfig(grace_s=120.0),
        )
        self._checkpointer: Checkpointer | None = None
        #: Of saves that are not complete, by iteration.
        self._recorders: dict[int, Recorder] = {}
        #: Phases of complete saves, by iteration.
        self._phases: dict[int, dict[str, float]] = {}

    def setup(self, state: State) -> None:
        self._adopt(state)
        started = time.perf_counter()
        self._checkpointer.link.client()
        self.figures["agent_start_s"] = time.perf_counter() - started
        expected = expect(self._checkpointer.model_state, [self._weights], self._optimizer)
        self._checkpointer.link.prepare(expected.nbytes, expected.plan_nbytes)
        # By the first save of a job the background preparation is complete, and the first training
        # step has made the dry run.
        self._checkpointer.link.client()
        self._checkpointer.dry_run(self._job)

    def _adopt(self, state: State) -> None:
        self._weights = Weights(state.of("weight"), self.rank, self.world_size)
        self._optimizer = MixedPrecision(self._weights, state)
        self._job = JobState(
            chunks=[self._weights],
            optimizer=self._optimizer,
            common={"args": _ARGS, "num_floating_point_operations_so_far": 0},
        )
        self._checkpointer = Checkpointer(str(self.root), self._config)
        self._checkpointer.start_run()

    def save(self, step: int, state: State) -> bool:
        report = self._checkpointer.save(SaveRequest(iteration=step, job=self._job))
        self._recorders[step] = report.recorder
        return report.copies is not None

    def settle(self, step: int) -> None:
        self._optimizer.step()

    def poll(self, step: int) -> bool:
        self._note(self._checkpointer.saves.poll())
        return step in self._phases

    def wait(self, step: int) -> None:
        self._note(self._checkpointer.wait())

    def _note(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.error is not None:
                raise RuntimeError(outcome.error)
            self._phases[outcome.iteration] = self._recorders.pop(outcome.iteration).seconds

    def load(self, state: State) -> int:
        self._loads(state)
        request = self._load_request(ModelState(self._config.replicated))
        store = open_store(self.root)
        save = stored_checkpoint.open_checkpoint(store, self.latest()).save
        with gc_paused():
            source = open_stored(store, save, self._config)
            return loader.load(request, source).origin.iteration

    def load_from_memory(self, state: State) -> int:
        self._loads(state)
        newest = held_in_memory(self._checkpointer).checkpoints[0]
        request = self._load_request(self._checkpointer.model_state)
        with gc_paused():
            return loader.load(request, open_memory(newest, self._config)).origin.iteration

    @contextlib.contextmanager
    def watch_load(self) -> Iterator[dict[str, float]]:
        """Measure the seconds of `preadv`, including waits for disks, and of digests."""
        took = {"copied": 0.0, "digested": 0.0}

        def timed(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any) -> Any:
                started = time.perf_counter()
                try:
                    return call(*args)
                finally:
                    took[what] += time.perf_counter() - started

            return wrapper

        class TimedDigest:
            def __init__(self) -> None:
                digest = new_chunk_digest()
                self.update = timed("digested", digest.update)
                self.hexdigest = digest.hexdigest

        with (
            mock.patch.object(os, "preadv", timed("copied", os.preadv)),
            mock.patch.object(slot_chunks, "new_chunk_digest", TimedDigest),
            mock.patch.object(stored_checkpoint, "new_chunk_digest", TimedDigest),
        ):
            yield took

    def _loads(self, state: State) -> None:
        if self._checkpointer is None:
            self._adopt(state)

    def _load_request(self, state: ModelState) -> LoadRequest:
        return LoadRequest(
            state, chunks=[self._weights], optimizer=self._optimizer, policy=LoadPolicy()
        )

    def files(self, step: int) -> list[Path]:
        """Return the files of a checkpoint, except commit records, which the agent removes."""
        return [path for path in super().files(step) if path.suffix != ".record"]

    def phases(self, step: int) -> dict[str, float]:
        return self._phases[step]

    def pids(self) -> set[int]:
        client = None if self._checkpointer is None else self._checkpointer.link.current
        return {client.agent_pid} if client is not None and self.rank == 0 else set()

    def close(self, *, keep: bool) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close(leave=not keep)
