"""What this Megatron has: the one place where releases are told apart, by looking at what is there.

Differences that only releases before core 0.7 make are in `old_releases`.

A function that was renamed looks like one that an old release lacks, and what it did would be left
out without a word: that is how DLRover's integration lost the shards of chained optimizers. So an
optional name is not merely looked up: `missing` also asks whether a release that has what came
later can lack it.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core import parallel_state

from megatron_flashckpt.megatron_lm.old_releases import has_async_utils as has_async_utils
from megatron_flashckpt.megatron_lm.stock import (
    LOAD_REQUIRED,
    SAVE_REQUIRED,
    checkpointing,
    half_swapped,
    loaded,
    original,
    stock_module,
)

#: Names in Megatron's `checkpointing` that every release has had.
_REQUIRED = (
    *("get_args", "unwrap_model", "print_rank_0", "update_num_microbatches"),
    *("set_checkpoint_version", "check_checkpoint_args"),
)
#: Names there that came later, those of one release in one line, in the order of the releases.
_OPTIONAL = (
    ("append_to_progress_log", "on_save_checkpoint_start", "on_save_checkpoint_success"),
    ("get_rerun_state_machine",),
    ("ft_integration", "maybe_save_dataloader_state", "wandb_utils"),
    ("set_loaded_iteration",),
)
#: Modules that show by themselves that a release has what some of these names do.
_MODULES = {"get_rerun_state_machine": "megatron.core.rerun_state_machine"}
_PARALLEL_STATE = (
    *("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"),
    *("get_pipeline_model_parallel_rank", "get_pipeline_model_parallel_world_size"),
    *("get_data_parallel_rank", "get_data_parallel_world_size", "get_data_parallel_group"),
    *("get_expert_model_parallel_rank", "get_expert_model_parallel_world_size"),
    "get_context_parallel_rank",
)
#: Arguments of the command line that every release has had.
_ARGS = ("save", "load", "finetune", "no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng")
#: Arguments of the command line that need a parameter of `save_checkpoint`.
_ARGS_OF_SAVE = {
    "non_persistent_save_interval": "non_persistent_ckpt",
    "rerun_mode": "train_data_iterator",
}


def feature(name: str) -> Any:
    """Return Megatron's own `name`, or None if this release is older than it."""
    assert any(name in names for names in _OPTIONAL)
    return getattr(checkpointing(), name, None)


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Return whether this release's `function` has a parameter of that name."""
    return parameter in inspect.signature(function).parameters


def missing(args: Any) -> list[str]:
    """Return what of Megatron is not as the shims expect it, one line each.

    Args:
        args: Megatron's own, to see which of its arguments are there.
    """
    stock = checkpointing()
    found = [
        f"{module.__name__} has no '{name}'"
        for module, names in ((stock, _REQUIRED), (parallel_state, _PARALLEL_STATE))
        for name in names
        if not hasattr(module, name)
    ]
    if (half := half_swapped()) is not None:
        found.append(half)
    return [*found, *_gone(stock), *_parameters(args), *_args(args)]


def _gone(stock: Any) -> Iterator[str]:
    """Yield the names that are not there although something later, or of theirs, is."""
    later: str | None = None
    for names in reversed(_OPTIONAL):
        there = next((name for name in names if hasattr(stock, name)), None)
        for name in names:
            module = _MODULES.get(name)
            shown_by = there or later or (module if module and exists(module) else None)
            if not hasattr(stock, name) and shown_by is not None:
                yield f"{stock.__name__} has no '{name}', though there is '{shown_by}'"
        later = later or there


def exists(module: str) -> bool:
    """Return whether `module` exists, without importing it."""
    return importlib.util.find_spec(module) is not None


def _parameters(args: Any) -> Iterator[str]:
    later = tuple(name for arg, name in _ARGS_OF_SAVE.items() if hasattr(args, arg))
    functions = [
        ("checkpointing", "save_checkpoint", SAVE_REQUIRED + later),
        ("checkpointing", "load_checkpoint", LOAD_REQUIRED),
    ]
    if loaded("training") is not None:
        functions.append(("training", "train_step", ("model", "optimizer")))
    if has_async_utils():
        functions.append(("async_utils", "maybe_finalize_async_save", ("blocking",)))
    for module, function, names in functions:
        home = stock_module(module)
        if not hasattr(home, function):
            yield f"{home.__name__} has no '{function}'"
            continue
        stock = original(module, function)
        for name in names:
            if not takes(stock, name):
                yield f"{function} of {home.__name__} has no parameter '{name}'"


def _args(args: Any) -> Iterator[str]:
    # Tests and tools make args of their own with what they need.
    if isinstance(args, argparse.Namespace):
        yield from (
            f"Megatron's args have no '{name}'" for name in _ARGS if not hasattr(args, name)
        )
