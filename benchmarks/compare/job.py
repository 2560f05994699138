"""What all measurements of one rank share: state, systems, turns, figures."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.systems import System, make
from benchmarks.workload import State, as_bytes, mapping


def slowest(value: float) -> float:
    """Return the largest of all ranks' values."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def total(value: float) -> float:
    """Return the sum of all ranks' values."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


class Job:
    """One rank of a job that measures.

    Args:
        args: those of `benchmarks.compare.rank`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.state = State(args.nbytes, args.pieces, self.rank)
        self.scratch = as_bytes(mapping(self.state.memory.numel()))
        self._scratch_pieces = self.state.like(self.scratch)
        self.systems: dict[str, System] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.step = 0
        for name in args.systems.split(","):
            root = args.root / name
            self.found[name] = {"errors": []}
            with self.reported(name, "start"):
                root.mkdir(exist_ok=True)
                self.systems[name] = make(name, root, self.rank, self.world)

    @contextlib.contextmanager
    def reported(self, name: str, what: str) -> Iterator[None]:
        """Leave a system out from now on, on all ranks, if it fails on any."""
        failed = 0.0
        try:
            yield
        except Exception as error:
            failed = 1.0
            traceback.print_exc()
            self.found[name]["errors"].append(f"{what}: {type(error).__name__}: {error}"[:400])
        if slowest(failed) and name in self.systems:
            _close(self.systems.pop(name), keep=False)

    def turns(self, rounds: int) -> Iterator[tuple[int, str]]:
        """Yield `(round, system)` so that no system always comes after the same one."""
        names = list(self.args.systems.split(","))
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                if name in self.systems:
                    yield turn, name

    def note(self, name: str, **values: Any) -> None:
        for key, value in values.items():
            self.found[name].setdefault(key, []).append(value)

    def memcpy_s(self) -> float:
        """Return the seconds of one plain copy of the state, all ranks at the same time.

        By the faster way. As words the state is copied by torch; the C library writes past the
        caches on some processors, but only when so much is copied at once (Intel: 24 ms for
        256 MiB, where words took 40; AMD: 1.1 times as long as words). How long the same takes
        tensor by tensor, as every system here has to copy, is noted with the limits.
        """
        target, source = self.scratch, self.state.memory
        words = [memory.view(torch.int64) for memory in (target, source)]
        pieces = list(self.state.tensors.values())
        self.found.setdefault("limits", {}).setdefault("memcpy_by_tensor_s", []).append(
            self._slowest_of(lambda: torch._foreach_copy_(self._scratch_pieces, pieces))
        )
        return min(
            self._slowest_of(lambda: words[0].copy_(words[1])),
            self._slowest_of(
                lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
            ),
        )

    def _slowest_of(self, work: Callable[[], object]) -> float:
        """Return the seconds that `work` takes on the slowest of all ranks, begun together."""
        dist.barrier()
        started = time.perf_counter()
        work()
        return slowest(time.perf_counter() - started)

    def close(self, *, keep: bool) -> None:
        for system in self.systems.values():
            _close(system, keep=keep)


def _close(system: System, *, keep: bool) -> None:
    """Let go of what a system has taken, processes included, whatever state it is in."""
    try:
        system.close(keep=keep)
    except Exception:  # the others are to be closed all the same
        traceback.print_exc()
