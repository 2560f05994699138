"""Megatron's legacy distributed optimizer: rank 0 gathers everybody's optimizer state."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.systems.base import COMMON, System
from benchmarks.workload import State


class Gather(System):
    """Saves weights per rank, and gathers masters and moments over gloo on rank 0, which saves."""

    background = False

    def save(self, step: int, state: State) -> bool:
        directory = self.make_directory(step)
        gathered = {}
        for name, tensor in _optimizer_state(state).items():
            parts = None
            if self.rank == 0:
                parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
            dist.gather(tensor, parts, dst=0)
            gathered[name] = parts
        weights = {"iteration": step, **COMMON, "state": state.of("weight")}
        torch.save(weights, directory / f"rank_{self.rank}.pt")
        if self.rank == 0:
            torch.save(gathered, directory / "distrib_optim.pt")
        self.track(step)
        return True

    def load(self, state: State) -> int:
        step = self.latest()
        directory = self.directory(step)
        loaded = torch.load(directory / f"rank_{self.rank}.pt", weights_only=False)["state"]
        for name, weight in state.of("weight").items():
            weight.copy_(loaded[name])
        gathered = None
        if self.rank == 0:
            gathered = torch.load(directory / "distrib_optim.pt", weights_only=False)
        for name, tensor in _optimizer_state(state).items():
            received = torch.empty_like(tensor)
            dist.scatter(received, None if gathered is None else gathered[name], src=0)
            tensor.copy_(received)
        return step


def _optimizer_state(state: State) -> dict[str, torch.Tensor]:
    return {name: t for name, t in state.tensors.items() if not name.startswith("weight/")}
