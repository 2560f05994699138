"""State, systems and figures that all measurements of one rank share."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.study import turned
from benchmarks.systems import System, make
from benchmarks.workload import State, as_bytes, mapping


@dataclasses.dataclass(frozen=True)
class Size:
    mib: float = 256
    """State of one rank, MiB."""
    pieces: int = 296
    """Tensors of one rank."""
    ranks: int = 2
    saves: int = 6
    """Saves after the first one."""
    first_saves: int = 5
    """First saves: one in the main job, the others in jobs of their own."""
    train_saves: int = 5
    loads: int = 5
    step_ms: float = 100
    timeout_s: float = 900


def slowest(value: float) -> float:
    """Return the largest value of all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def total(value: float) -> float:
    """Return the sum over all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


class Job:
    """One rank of a measuring job.

    Args:
        names: systems, which take turns.
        root: empty directory of the job.
    """

    def __init__(self, names: list[str], size: Size, root: Path) -> None:
        self.size, self.root = size, root
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.state = State(int(size.mib * 2**20), size.pieces, self.rank)
        self.scratch = as_bytes(mapping(self.state.memory.numel()))
        self._scratch_pieces = self.state.like(self.scratch)
        self.systems: dict[str, System] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.limits: dict[str, list[float]] = {}
        """Seconds of plain copies, writes and reads."""
        self.step = 0
        self._names = names
        for name in names:
            self.results[name] = {"errors": []}
            with self.reported(name, "start"):
                (root / name).mkdir(exist_ok=True)
                self.systems[name] = make(name, root / name, self.rank, self.world)

    def figures(self) -> dict[str, Any]:
        return {
            "rank_nbytes": self.state.nbytes,
            "pieces": len(self.state.tensors),
            "systems": self.results,
            "limits": self.limits,
        }

    @contextlib.contextmanager
    def reported(self, name: str, what: str) -> Iterator[None]:
        """Record an exception; close a system on all ranks if it failed on any rank."""
        failed = 0.0
        try:
            yield
        except Exception as error:
            failed = 1.0
            traceback.print_exc()
            self.results[name]["errors"].append(f"{what}: {type(error).__name__}: {error}"[:400])
        if slowest(failed) and name in self.systems:
            _close(self.systems.pop(name), keep=False)

    def interleaved(self, rounds: int) -> Iterator[tuple[int, str]]:
        """Yield `(round, system)`; the order of the systems rotates from round to round."""
        for number in range(rounds):
            for name in turned(self._names, number):
                if name in self.systems:
                    yield number, name

    def note(self, name: str, **values: Any) -> None:
        for key, value in values.items():
            self.results[name].setdefault(key, []).append(value)

    def note_limit(self, name: str, seconds: float) -> float:
        self.limits.setdefault(name, []).append(seconds)
        return seconds

    def memcpy_s(self) -> float:
        """Return the seconds of one plain copy of the state on all ranks at the same time.

        This is the faster of two ways: torch copies 8-byte words; `memmove` bypasses the caches on
        some processors when it copies this much (Intel: 24 ms instead of 40 ms for 256 MiB). The
        time of copying tensor by tensor, as every system here must, is recorded with the limits.
        """
        target, source = self.scratch, self.state.memory
        words = [memory.view(torch.int64) for memory in (target, source)]
        pieces = list(self.state.tensors.values())
        self.note_limit(
            "memcpy_by_tensor_s",
            self._slowest_of(lambda: torch._foreach_copy_(self._scratch_pieces, pieces)),
        )
        return min(
            self._slowest_of(lambda: words[0].copy_(words[1])),
            self._slowest_of(
                lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
            ),
        )

    def _slowest_of(self, work: Callable[[], object]) -> float:
        """Return the seconds of `work` on the slowest rank; all ranks start it together."""
        dist.barrier()
        started = time.perf_counter()
        work()
        return slowest(time.perf_counter() - started)

    def close(self, *, keep: bool) -> None:
        for system in self.systems.values():
            _close(system, keep=keep)


def _close(system: System, *, keep: bool) -> None:
    try:
        system.close(keep=keep)
    except Exception:  # the other systems must be closed, too
        traceback.print_exc()
