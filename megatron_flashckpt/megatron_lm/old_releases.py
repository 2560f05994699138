"""Differences that only Megatron before core 0.7 makes.

The oldest release that we run with is cb995d5 of early 2024. When support of these releases ends,
this module goes, and with it what its names stand for. It looks at what is there and never at
version numbers, as `compat` does for all later releases.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

#: Packages that hold the training code; the modules of `megatron` itself before core 0.6.
TRAINING_PACKAGES = ("megatron.training", "megatron")
#: Packages that hold the optimizers: in the library since core 0.6.
_OPTIMIZER_PACKAGES = ("megatron.core", "megatron")

#: Method of a DistributedOptimizer that tells which part of a parameter this rank owns.
RANGE_MAP_NAMES = ("_get_model_param_range_map", "get_model_param_range_map")
#: Its gradient buffers, which know the parameters of all replicas.
BUFFER_NAMES = ("buffers", "grad_buffers")


def training_package() -> str:
    """Return the package of Megatron's training code: `megatron` before core 0.6.

    There `megatron.training` is a module. Imports nothing of it.
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
    """Return Megatron's module `optimizer.<name>`, not in the library before core 0.6.

    Raises:
        ModuleNotFoundError: there is none.
    """
    newest, oldest = (f"{package}.optimizer" for package in _OPTIMIZER_PACKAGES)
    package = oldest if importlib.util.find_spec(newest) is None else newest
    return importlib.import_module(f"{package}.{name}")


def has_async_utils() -> bool:
    """Return whether the training loop asks for the results of asynchronous saves (core 0.7)."""
    return importlib.util.find_spec(f"{training_package()}.async_utils") is not None


def range_map(optimizer: Any) -> Any:
    """Return the bound method of a DistributedOptimizer by which it knows its ranges."""
    return getattr(optimizer, _present(optimizer, RANGE_MAP_NAMES))


def gradient_buffers(optimizer: Any) -> Any:
    """Return the gradient buffers of a DistributedOptimizer."""
    return getattr(optimizer, _present(optimizer, BUFFER_NAMES))


def _present(optimizer: Any, names: tuple[str, str]) -> str:
    """Return the name that this release uses; it was changed in core 0.6."""
    return next(name for name in names if hasattr(optimizer, name))


def config_of(optimizer: Any) -> Any:
    """Return the settings of a Megatron optimizer; None before core 0.6, which has none there."""
    return getattr(optimizer, "config", None)


def gathers_beside_parameters(optimizer: Any) -> bool:
    """Return whether an overlapped all-gather lands in a buffer beside the parameters.

    So it does before core 0.7, even on the rank that owns a range. The next forward copies it over.
    """
    overlaps = getattr(optimizer, "overlap_param_gather", False)
    return bool(overlaps) and hasattr(optimizer, "param_buffer_copied")
