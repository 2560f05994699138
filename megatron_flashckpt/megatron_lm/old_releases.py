"""Differences of Megatron releases before core 0.7.

The oldest supported release is cb995d5 of early 2024. When support of these releases ends, this
module can be removed. It checks which names exist and never version numbers, as `compat` does for
all later releases.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

#: Packages of the training code; before core 0.6 its modules are in `megatron` itself.
TRAINING_PACKAGES = ("megatron.training", "megatron")
#: Packages of the optimizers; they are in megatron.core since core 0.6.
_OPTIMIZER_PACKAGES = ("megatron.core", "megatron")

#: Method of a DistributedOptimizer that returns the part of a parameter that this rank owns.
RANGE_MAP_NAMES = ("_get_model_param_range_map", "get_model_param_range_map")
#: Attribute for its gradient buffers, which list the parameters of all replicas.
BUFFER_NAMES = ("buffers", "grad_buffers")


def training_package() -> str:
    """Return the package of Megatron's training code: `megatron` before core 0.6.

    Before core 0.6 `megatron.training` is a module. This function does not import it.
    """
    newest, oldest = TRAINING_PACKAGES
    module = sys.modules.get(newest)
    if module is not None:
        return newest if hasattr(module, "__path__") else oldest
    try:
        spec = importlib.util.find_spec(newest)
    except ModuleNotFoundError:  # no Megatron at all
        return newest
    is_module = spec is not None and spec.submodule_search_locations is None
    return oldest if is_module else newest


def optimizer_module(name: str) -> ModuleType:
    """Return Megatron's module `optimizer.<name>`; before core 0.6 it is not in megatron.core.

    Raises:
        ModuleNotFoundError: the module does not exist.
    """
    newest, oldest = (f"{package}.optimizer" for package in _OPTIMIZER_PACKAGES)
    package = oldest if importlib.util.find_spec(newest) is None else newest
    return importlib.import_module(f"{package}.{name}")


def has_async_utils() -> bool:
    """Return whether the training loop polls asynchronous saves (since core 0.7)."""
    return importlib.util.find_spec(f"{training_package()}.async_utils") is not None


def range_map(optimizer: Any) -> Any:
    """Return the bound method of a DistributedOptimizer that returns its ranges."""
    return getattr(optimizer, _present(optimizer, RANGE_MAP_NAMES))


def gradient_buffers(optimizer: Any) -> Any:
    """Return the gradient buffers of a DistributedOptimizer."""
    return getattr(optimizer, _present(optimizer, BUFFER_NAMES))


def _present(optimizer: Any, names: tuple[str, str]) -> str:
    """Return the name that this release uses; core 0.6 renamed it."""
    return next(name for name in names if hasattr(optimizer, name))


def config_of(optimizer: Any) -> Any:
    """Return the settings of a Megatron optimizer; None before core 0.6."""
    return getattr(optimizer, "config", None)


def gathers_into_buffer(optimizer: Any) -> bool:
    """Return whether an overlapped all-gather writes to a buffer instead of the parameters.

    Before core 0.7 it does, also on the rank that owns a range. The next forward pass copies the
    buffer into the parameters.
    """
    overlaps = getattr(optimizer, "overlap_param_gather", False)
    return bool(overlaps) and hasattr(optimizer, "param_buffer_copied")
