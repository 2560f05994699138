"""Interface between the benchmark and a checkpoint system."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.workload import State

TRACKER = "latest_checkpointed_iteration.txt"
#: State that every job saves in addition to its tensors: arguments and counters.
COMMON: dict[str, Any] = {f"argument_{n}": n for n in range(300)}


class System:
    """One checkpoint system on one rank. All ranks call every method together.

    Args:
        root: empty directory of the system, the same on all ranks.
        options: options of this variant in `systems.CATALOGUE`.
    """

    #: True if `save` returns before the checkpoint is complete.
    background = True

    def __init__(self, root: Path, rank: int, world_size: int, options: dict[str, Any]) -> None:
        self.root = root
        self.rank = rank
        self.world_size = world_size
        self.options = options
        #: Figures that only this system measures.
        self.figures: dict[str, float] = {}

    def setup(self, state: State) -> None:
        """Prepare the first save, as a job does at its start."""

    def save(self, step: int, state: State) -> bool:
        """Save; return when training may continue. Returns False if the system skipped the save."""
        raise NotImplementedError

    def settle(self, step: int) -> None:
        """Wait until the tensors may change; called where the optimizer would change them."""

    def poll(self, step: int) -> bool:
        """Return whether the system reports `step` as complete; called after each step."""
        return True

    def wait(self, step: int) -> None:
        """Wait until the system reports `step` as complete."""

    def latest(self) -> int:
        """Return the newest step that this system would load; -1 if there is none."""
        try:
            return int((self.root / TRACKER).read_text())
        except (FileNotFoundError, ValueError):
            return -1

    def load(self, state: State) -> int:
        """Fill `state` from the newest checkpoint in storage; return its step."""
        raise NotImplementedError

    def load_from_memory(self, state: State) -> int | None:
        """Fill `state` from host memory; return the step, or None if the system cannot do so."""
        return None

    #: True if restarted ranks can load the checkpoint in memory. Otherwise the load is measured in
    #: the ranks that saved.
    memory_survives = False

    def phases(self, step: int) -> dict[str, float]:
        """Return the seconds of each phase of `step` on this rank, if they are known."""
        return {}

    def watch_load(self) -> contextlib.AbstractContextManager[dict[str, float]]:
        """Measure the seconds of parts of the load inside the context, if that is possible."""
        return contextlib.nullcontext({})

    def pids(self) -> set[int]:
        """Return processes that work for this rank and are not its children."""
        return set()

    def close(self, *, keep: bool) -> None:
        """Close the system. With `keep`, keep checkpoints in memory for later loads."""

    # ------------------------------------------------------------------ for subclasses

    def directory(self, step: int) -> Path:
        return self.root / f"iter_{step:07d}"

    def files(self, step: int) -> list[Path]:
        return sorted(path for path in self.directory(step).rglob("*") if path.is_file())

    def prune(self, step: int) -> None:
        if self.rank == 0:
            for path in self.root.glob("iter_*"):
                if int(path.name[5:]) < step:
                    shutil.rmtree(path, ignore_errors=True)
        dist.barrier()

    def make_directory(self, step: int) -> Path:
        path = self.directory(step)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def track(self, step: int) -> None:
        """Wait for all ranks; rank 0 then writes `step` to the tracker."""
        dist.barrier()
        if self.rank == 0:
            (self.root / TRACKER).write_text(str(step))
        dist.barrier()


def fill(state: State, loaded: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.tensors.items():
        tensor.copy_(loaded[name])
