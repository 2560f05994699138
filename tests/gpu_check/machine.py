"""The machine that a section runs on: real GPUs, or a simulated node of them."""

from __future__ import annotations

import importlib.util
from typing import TypeVar

import torch

from tests.simulated_gpu import Node

T = TypeVar("T")

#: The simulated node; None on a machine with a GPU. Set by `section.py` before a section runs.
simulated_node: Node | None = None


def pick(on_gpu: T, simulated: T) -> T:
    """Return the first on a GPU, the second (usually a smaller size) on the simulated node."""
    return on_gpu if simulated_node is None else simulated


def gpus() -> int:
    """Return the number of real GPUs."""
    return torch.cuda.device_count() if simulated_node is None else 0


def has_megatron() -> bool:
    """Return whether megatron-core is installed, without importing it."""
    return importlib.util.find_spec("megatron") is not None
