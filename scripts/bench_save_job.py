"""What all measurements of one rank share: state, systems, turns, figures."""

from __future__ import annotations

import argparse
import contextlib
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from systems import System, make
from workload import State, as_bytes, mapping


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
        args: those of `bench_save_rank`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.state = State(args.nbytes, args.pieces, self.rank)
        self.scratch = as_bytes(mapping(self.state.memory.numel()))
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

        As words: the fastest that was found. The C library's `memmove` took up to 1.1 times as
        long, a copy of single bytes 1.3.
        """
        target, source = self.scratch.view(torch.int64), self.state.memory.view(torch.int64)
        dist.barrier()
        started = time.perf_counter()
        target.copy_(source)
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
