"""Features of this Megatron release, recognized by the names that exist, never by version.

Differences of releases before core 0.7 are in `old_releases`.

A renamed function looks like a function that an old release does not have, and its work would be
skipped silently. DLRover's integration lost the shards of chained optimizers in this way. So
`missing` also reports a missing optional name if a name of a later release exists.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core import parallel_state

from megatron_flashckpt.errors import ConfigError
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
from megatron_flashckpt.storage.msc_profile import MSC
from megatron_flashckpt.storage.opening import is_url, open_store

#: Names in Megatron's `checkpointing` that every release has.
_REQUIRED = (
    *("get_args", "unwrap_model", "print_rank_0", "update_num_microbatches"),
    *("set_checkpoint_version", "check_checkpoint_args"),
)
#: Names added to `checkpointing` later: one line per release, in the order of the releases.
_OPTIONAL = (
    ("append_to_progress_log", "on_save_checkpoint_start", "on_save_checkpoint_success"),
    ("get_rerun_state_machine",),
    ("ft_integration", "maybe_save_dataloader_state", "wandb_utils"),
    ("set_loaded_iteration",),
    ("_maybe_compact_rollout_bank",),
)
#: Modules whose existence shows that a release has the feature of a name.
_MODULES = {"get_rerun_state_machine": "megatron.core.rerun_state_machine"}
_PARALLEL_STATE = (
    *("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"),
    *("get_pipeline_model_parallel_rank", "get_pipeline_model_parallel_world_size"),
    *("get_data_parallel_rank", "get_data_parallel_world_size", "get_data_parallel_group"),
    *("get_expert_model_parallel_rank", "get_expert_model_parallel_world_size"),
    "get_context_parallel_rank",
)
#: Command-line arguments that every release has.
_ARGS = ("save", "load", "finetune", "no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng")
#: Command-line arguments that need a parameter of `save_checkpoint`.
_ARGS_OF_SAVE = {
    "non_persistent_save_interval": "non_persistent_ckpt",
    "rerun_mode": "train_data_iterator",
}


def feature(name: str) -> Any:
    """Return Megatron's `name`, or None if this release is older than that name."""
    assert any(name in names for names in _OPTIONAL)
    return getattr(checkpointing(), name, None)


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Return whether this release's `function` has the parameter."""
    return parameter in inspect.signature(function).parameters


def keeps_given_rates() -> bool:
    """Return whether Megatron's load obeys --override-opt-param-scheduler in param groups.

    Earlier releases (seen until core 0.19) take the rates of the checkpoint in spite of the flag.
    """
    load = inspect.unwrap(original("checkpointing", "load_checkpoint"))
    return "override_opt_param_scheduler" in load.__code__.co_consts


def missing(args: Any) -> list[str]:
    """Return one line per difference between Megatron and the shims' expectations.

    Args:
        args: Megatron's args; the check tests which arguments exist.
    """
    stock = checkpointing()
    lines = [
        f"{module.__name__} has no '{name}'"
        for module, names in ((stock, _REQUIRED), (parallel_state, _PARALLEL_STATE))
        for name in names
        if not hasattr(module, name)
    ]
    if (half := half_swapped()) is not None:
        lines.append(half)
    return [*lines, *_missing_optional(stock), *_parameters(args), *_args(args)]


def _missing_optional(stock: Any) -> Iterator[str]:
    """Yield one line per missing name if a name of the same or a later release exists."""
    later: str | None = None
    for names in reversed(_OPTIONAL):
        present = next((name for name in names if hasattr(stock, name)), None)
        for name in names:
            module = _MODULES.get(name)
            shown_by = present or later or (module if module and exists(module) else None)
            if not hasattr(stock, name) and shown_by is not None:
                yield f"{stock.__name__} has no '{name}', though there is '{shown_by}'"
        later = later or present


def exists(module: str) -> bool:
    """Return whether `module` exists, without importing it."""
    return importlib.util.find_spec(module) is not None


def loads_itself(args: Any, root: str) -> bool:
    """Return whether Megatron itself can load from `root` what is in its own formats.

    Object stores it reaches by NVIDIA's Multi-Storage Client alone. Until core 0.17 `enable_msc` is
    set whether or not the client is installed. Without the client Megatron takes `root` for a
    missing directory, and the job would start from scratch.
    """
    is_by_msc = root.startswith(MSC) and bool(getattr(args, "enable_msc", False))
    return not is_url(root) or (is_by_msc and exists("multistorageclient"))


def is_known_to_msc_alone(args: Any, root: str | None) -> bool:
    """Return whether only Megatron can load from `root`: its profile is not plain, or there is no
    obstore.
    """
    if root is None or not root.startswith(MSC) or not loads_itself(args, root):
        return False
    try:
        open_store(root)
    except ConfigError:
        return True
    return False


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
    # Tests and tools pass objects of other classes with the few arguments that they need.
    if isinstance(args, argparse.Namespace):
        yield from (
            f"Megatron's args have no '{name}'" for name in _ARGS if not hasattr(args, name)
        )
