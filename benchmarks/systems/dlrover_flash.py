"""DLRover's flash checkpoint, with its engine for Megatron's distributed optimizer.

The paths and the split into model and optimizer are those of `megatron_dist_ckpt.save_checkpoint`;
there is no Megatron model. The engine starts the saver process itself, because no `dlrover-run` has
started one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.systems.base import COMMON, System, fill
from benchmarks.workload import State

os.environ.setdefault("DLROVER_LOG_LEVEL", "ERROR")

from dlrover.python.common.storage import PosixDiskStorage
from dlrover.trainer.torch.flash_checkpoint.megatron_engine import MegatronDistCheckpointEngine

_PATIENCE_S = 120.0


class DLRover(System):
    """Saves with `save_to_storage`: to shared memory, from which the saver writes without fsync."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._engine: MegatronDistCheckpointEngine | None = None

    def setup(self, state: State) -> None:
        self._engine = MegatronDistCheckpointEngine(str(self.root), PosixDiskStorage())

    def _paths(self, step: int) -> dict[str, str]:
        directory = self.directory(step)
        return {
            "model_states": f"{directory}/mp_rank_{self.rank:02d}/model_optim_rng.pt",
            "optim_states": f"{directory}/rank_{self.rank:05d}/distrib_optim.pt",
        }

    def save(self, step: int, state: State) -> bool:
        model = {n: t for n, t in state.tensors.items() if n.startswith("weight/")}
        content = {
            "model_states": {"iteration": step, **COMMON, "model": model},
            "optim_states": {n: t for n, t in state.tensors.items() if n not in model},
        }
        self._engine.save_to_storage(step, content, self._paths(step))
        # DLRover skips a save while it writes the last one; besides this field only its log shows
        # it.
        return self._engine._cached_step == step

    def poll(self, step: int) -> bool:
        return self.latest() == step

    def wait(self, step: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not self.poll(step):
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} was not complete after {_PATIENCE_S:.0f} s")
            time.sleep(0.005)

    def load(self, state: State) -> int:
        step = self.latest()
        paths = self._paths(step)
        model, optimizer = (
            torch.load(paths[part], map_location="cpu", weights_only=False)
            for part in ("model_states", "optim_states")
        )
        fill(state, {**model["model"], **optimizer})
        return step

    def load_from_memory(self, state: State) -> int | None:
        step, content = self._engine.get_state_dict_from_memory()
        fill(state, {**content["model_states"]["model"], **content["optim_states"]})
        return step

    def close(self, *, keep: bool) -> None:
        if self._engine is None:
            return
        saver = self._engine.saver_proc
        self._engine.close()
        dist.barrier()
        if saver:
            saver.terminate()
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
        for left in Path("/dev/shm").glob(f"{run_id}_ckpt_shm_{self.rank}"):
            left.unlink(missing_ok=True)
