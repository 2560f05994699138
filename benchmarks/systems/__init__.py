"""Checkpoint systems that `scripts/bench save` compares, one module each."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.systems.base import System

__all__ = ["CATALOGUE", "QUICK", "Entry", "System", "make"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One system, or one way of using it."""

    label: str
    home: str
    """Module of this package and the class in it."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Modules that the system requires."""
    install: str = ""
    """Arguments of the `pip install` that installs these modules."""

    def missing(self) -> str | None:
        """Return the command that installs missing modules; None if nothing is missing."""
        modules = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"pip install {self.install}" if modules else None


_DLROVER = {
    "needs": ("dlrover", "grpc", "kubernetes"),
    "install": "--no-deps dlrover==0.6.1 && pip install grpcio protobuf kubernetes psutil "
    "requests deprecated nvidia-ml-py tornado importlib-metadata",
}

CATALOGUE: dict[str, Entry] = {
    "flashckpt": Entry("flashckpt", "ours:Ours"),
    "flashckpt-blocking": Entry(
        "flashckpt, staging: blocking", "ours:Ours", {"staging": "blocking"}
    ),
    "torch.save": Entry("torch.save per rank", "torch_save:TorchSave"),
    "gather": Entry("gather to rank 0 + torch.save", "gather:Gather"),
    "dlrover": Entry("DLRover flash checkpoint", "dlrover_flash:DLRover", **_DLROVER),
    "dcp": Entry("PyTorch DCP", "dcp:DCP", {"kind": "sync", "threads": 1}),
    "dcp-thread": Entry(
        "PyTorch DCP async, thread, cached plans",
        "dcp:DCP",
        {"kind": "thread", "threads": 2, "cached": True},
    ),
    "torch_dist": Entry(
        "Megatron torch_dist async, fully parallel, cached",
        "torch_dist:TorchDist",
        needs=("megatron.core",),
        install="--no-deps megatron-core==0.17.1",
    ),
}
#: Systems of `--quick`.
QUICK = ("flashckpt", "torch.save", "dlrover")


def make(name: str, root: Path, rank: int, world_size: int) -> System:
    entry = CATALOGUE[name]
    module, _, kind = entry.home.partition(":")
    system: type[System] = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    return system(root, rank, world_size, entry.options)
