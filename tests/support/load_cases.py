"""Copies of a checkpoint, each damaged in its own way, that one job of real Megatron loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.megatron_jobs import Result, run_cases

Damage = Callable[[Path], object]


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(file.relative_to(directory)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def shard(iteration_directory: Path, rank: int) -> Path:
    (file,) = iteration_directory.glob(f"*.rank_{rank:05d}.safetensors")
    return file


class LoadCases:
    """Cases of `jobs/many_loads.py` on two ranks; `before` has the files of each copy."""

    RANKS = 2

    def __init__(self, where: Path, good: Path) -> None:
        self.where, self.good = where, good
        self.cases: list[dict[str, Any]] = []
        self.before: dict[str, Any] = {}
        self.result: Result

    def place(self, name: str) -> Path:
        return self.where / name.replace(" ", "_")

    def add(self, name: str, damage: Damage | None = None, **fields: Any) -> None:
        """Add the load of a copy; `args` are further arguments of Megatron."""
        directory = self.place(name)
        shutil.copytree(self.good, directory)
        if damage is not None:
            damage(directory)
        self.before[name] = snapshot(directory)
        args = {"load": str(directory), **fields.pop("args", {})}
        self.cases.append({"name": name, "call": "load", "args": args, **fields})

    def run(self, model: list[str]) -> None:
        self.result = run_cases(self.where, "cases", model, self.cases, ranks=self.RANKS)

    def of(self, name: str) -> list[dict[str, Any]]:
        events = self.result.named(name)
        assert [event["rank"] for event in events] == list(range(self.RANKS))
        return events

    def assert_unchanged(self, name: str) -> None:
        assert snapshot(self.place(name)) == self.before[name]
