"""Format of Megatron's `--ckpt-format torch`: every rank saves its part with `torch.save`."""

from __future__ import annotations

import torch

from benchmarks.systems.base import COMMON, System, fill
from benchmarks.workload import State


class TorchSave(System):
    """Saves with `torch.save` per rank, a barrier, and then the tracker, without fsync."""

    background = False

    def save(self, step: int, state: State) -> bool:
        path = self.make_directory(step) / f"rank_{self.rank}.pt"
        torch.save({"iteration": step, **COMMON, "state": state.tensors}, path)
        self.track(step)
        return True

    def load(self, state: State) -> int:
        step = self.latest()
        path = self.directory(step) / f"rank_{self.rank}.pt"
        fill(state, torch.load(path, map_location="cpu", weights_only=False)["state"])
        return step
