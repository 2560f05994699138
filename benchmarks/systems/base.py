"""What the benchmark asks of a checkpoint system."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.workload import State

TRACKER = "latest_checkpointed_iteration.txt"
#: What every job saves beside its tensors: arguments and counters.
COMMON: dict[str, Any] = {f"argument_{n}": n for n in range(300)}


class System:
    """One checkpoint system on one rank. All ranks call every method together.

    Args:
        root: an empty directory of its own, the same on all ranks.
        options: those that `systems.CATALOGUE` gives to this variant.
    """

    #: Whether `save` returns before the checkpoint is complete.
    background = True

    def __init__(self, root: Path, rank: int, world_size: int, options: dict[str, Any]) -> None:
        self.root = root
        self.rank = rank
        self.world_size = world_size
        self.options = options
        #: What only this system can tell of itself.
        self.figures: dict[str, float] = {}

    def setup(self, state: State) -> None:
        """Get ready before the first save: what a job does when it starts."""

    def save(self, step: int, state: State) -> bool:
        """Save; return when training may go on. False: the system left this save out."""
        raise NotImplementedError

    def settle(self, step: int) -> None:
        """Return when the tensors may change: called where the optimizer would change them."""

    def poll(self, step: int) -> bool:
        """Return whether `step` is complete as this system sees it; called after each step."""
        return True

    def wait(self, step: int) -> None:
        """Return when `step` is complete as this system sees it."""

    def latest(self) -> int:
        """Return the newest step that this system would load; -1: there is none."""
        try:
            return int((self.root / TRACKER).read_text())
        except (FileNotFoundError, ValueError):
            return -1

    def load(self, state: State) -> int:
        """Fill `state` from the newest checkpoint in storage; return its step."""
        raise NotImplementedError

    def load_from_memory(self, state: State) -> int | None:
        """Fill `state` from host memory; return the step, None if this system cannot."""
        return None

    #: Whether what is in memory can be loaded after all ranks have started anew; else it is
    #: measured in the ranks that saved it.
    memory_survives = False

    def phases(self, step: int) -> dict[str, float]:
        """Return what `step` took on this rank by phase, in seconds, as far as it is known."""
        return {}

    def watch_load(self) -> contextlib.AbstractContextManager[dict[str, float]]:
        """Measure what parts of the load within take, in seconds, as far as that can be told."""
        return contextlib.nullcontext({})

    def pids(self) -> set[int]:
        """Return processes that work for this rank and are not its children."""
        return set()

    def close(self, *, keep: bool) -> None:
        """End. With `keep`, leave in memory what can be loaded from there."""

    # ------------------------------------------------------------------ for subclasses

    def directory(self, step: int) -> Path:
        return self.root / f"iter_{step:07d}"

    def files(self, step: int) -> list[Path]:
        """Return the files of `step`."""
        return sorted(path for path in self.directory(step).rglob("*") if path.is_file())

    def prune(self, step: int) -> None:
        """Remove what is older than `step`."""
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
        """Let rank 0 say that `step` is the newest, once all ranks are here."""
        dist.barrier()
        if self.rank == 0:
            (self.root / TRACKER).write_text(str(step))
        dist.barrier()


def fill(state: State, loaded: dict[str, torch.Tensor]) -> None:
    """Copy what was loaded into the tensors of the job."""
    for name, tensor in state.tensors.items():
        tensor.copy_(loaded[name])
