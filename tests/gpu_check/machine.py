"""The machine that a section runs on: real GPUs, or a simulated node of them."""

from __future__ import annotations

import importlib.util
import time
from typing import TypeVar

import torch

from tests.simulated_gpu import Node

T = TypeVar("T")

#: The simulated node; None on a machine with a GPU. Set by `section.py` before a section runs.
simulated_node: Node | None = None
#: When the driver will kill this section, on the monotonic clock.
deadline = float("inf")


def seconds_left() -> float:
    """Return how long this section may still run, for one that does as much as it has time for."""
    return deadline - time.monotonic()


def pick(on_gpu: T, simulated: T) -> T:
    """Return the first on a GPU, the second (usually a smaller size) on the simulated node."""
    return on_gpu if simulated_node is None else simulated


def gpus() -> int:
    """Return the number of real GPUs."""
    return torch.cuda.device_count() if simulated_node is None else 0


def has_megatron() -> bool:
    """Return whether megatron-core is installed, without importing it."""
    return importlib.util.find_spec("megatron") is not None
