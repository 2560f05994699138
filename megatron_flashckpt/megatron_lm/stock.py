"""Megatron's own checkpointing module, whichever release it is, and calls in its signature.

Versions are not parsed: what the stock module imports under its name (`get_args`, `unwrap_model`)
is taken from it, and arguments are bound to the signature that the stock function has. `compat` has
what only some releases have, `old_releases` what only those before core 0.7 do otherwise.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm.old_releases import TRAINING_PACKAGES, training_package
from megatron_flashckpt.megatron_lm.stock_arguments import refuse_unknown


def stock_module(name: str) -> ModuleType:
    """Return Megatron's own module `name` (`checkpointing`, `async_utils`, `training`).

    Raises:
        UnsupportedError: no Megatron-LM training code can be imported.
    """
    path = f"{training_package()}.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        # A dependency that is missing inside Megatron must not look like Megatron missing.
        if error.name is None or not path.startswith(error.name):
            raise
    paths = " or ".join(f"{package}.{name}" for package in TRAINING_PACKAGES)
    raise UnsupportedError(
        f"no {paths} can be imported: run from a "
        "Megatron-LM checkout, or install megatron-core >= 0.17, whose wheel has megatron.training"
    )


_ORIGINALS: dict[tuple[str, str], Callable[..., Any]] = {}


def replace(module: str, name: str, replacement: Callable[..., Any]) -> None:
    """Put `replacement` in the place of a stock function, for an unedited script.

    Modules of Megatron import such names, so it is set wherever they have done so. `original` still
    finds the stock function.
    """
    stock = _ORIGINALS.setdefault((module, name), getattr(stock_module(module), name))
    stock_module("training")  # imports, with all that it needs, whoever calls these functions
    for key, importer in list(sys.modules.items()):
        names = getattr(importer, "__dict__", {}) if key.partition(".")[0] == "megatron" else {}
        if names.get(name) is stock:
            setattr(importer, name, replacement)


def original(module: str, name: str) -> Callable[..., Any]:
    """Return Megatron's own function, also when `replace` has put another in its place."""
    return _ORIGINALS.get((module, name)) or getattr(stock_module(module), name)


def checkpointing() -> ModuleType:
    """Return Megatron's own `checkpointing` module."""
    return stock_module("checkpointing")


def is_replaced(module: str, name: str) -> bool:
    """Return whether `replace` was called for a function."""
    return (module, name) in _ORIGINALS


def loaded(name: str) -> ModuleType | None:
    """Return `stock_module(name)` if something has imported it already."""
    return sys.modules.get(f"{training_package()}.{name}")


def door() -> str:
    """Return which way in the training script took, as far as it can be seen."""
    if is_replaced("checkpointing", "save_checkpoint"):
        return "through the launcher"
    training = loaded("training")
    if training is not None and _is_ours(getattr(training, "save_checkpoint", None)):
        return f"by the imports of {training.__file__}"
    return "called by the training script itself"


def half_swapped() -> str | None:
    """Return how only one of the two imports leads to us; None: that is not so."""
    training = loaded("training")
    there = {name: getattr(training, name, None) for name in ("save_checkpoint", "load_checkpoint")}
    ours = [name for name, function in there.items() if _is_ours(function)]
    stock = [name for name in there if there[name] is original("checkpointing", name)]
    if training is None or not ours or not stock:
        return None
    return (
        f"{training.__file__} has {ours[0]} from megatron_flashckpt, but {stock[0]} from Megatron: "
        "swap both imports"
    )


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("megatron_flashckpt")


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments by name, defaults filled in, as this release's `function` takes them.

    Raises:
        TypeError: an argument that this release does not have; refused, not ignored.
    """
    bound = inspect.signature(function).bind_partial(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


#: What the shims act on, by Megatron's names: in every release, then in later ones.
SAVE_REQUIRED: tuple[str, ...] = (
    *("iteration", "model", "optimizer", "opt_param_scheduler"),
    "num_floating_point_operations_so_far",
)
SAVE_ARGUMENTS = (*SAVE_REQUIRED, "non_persistent_ckpt", "train_data_iterator", "release")
#: But for the first, the model, which was renamed in core 0.12.
LOAD_REQUIRED = ("optimizer", "opt_param_scheduler", "load_arg", "strict")
LOAD_ARGUMENTS = (*LOAD_REQUIRED, "skip_load_to_model_and_opt")


@dataclasses.dataclass(frozen=True)
class SaveCall:
    """The arguments of `save_checkpoint` that any release has, by our names."""

    iteration: int
    model: list[Any]
    optimizer: Any
    scheduler: Any
    floating_point_operations: Any
    non_persistent: bool
    release: bool
    data_iterator: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SaveCall:
        """Return the call; a release checkpoint, which stock makes, with whatever arguments.

        Raises:
            TypeError: an argument that this release does not have.
            UnsupportedError: one that the shim does not know, and not at its default.
        """
        stock = original("checkpointing", "save_checkpoint")
        named = bind(stock, args, kwargs)
        if not named.get("release", False):
            refuse_unknown("save_checkpoint", inspect.signature(stock), named, SAVE_ARGUMENTS)
        return cls(
            iteration=int(named["iteration"]),
            model=named["model"] if isinstance(named["model"], list) else [named["model"]],
            optimizer=named["optimizer"],
            scheduler=named["opt_param_scheduler"],
            # The autoresume path calls without it.
            floating_point_operations=named.get("num_floating_point_operations_so_far", 0),
            non_persistent=bool(named.get("non_persistent_ckpt", False)),
            release=bool(named.get("release", False)),
            data_iterator=named.get("train_data_iterator"),
        )


@dataclasses.dataclass(frozen=True)
class LoadCall:
    """The arguments of `load_checkpoint` that any release has, by our names."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    load_arg: str
    strict: bool
    skip_model_and_optimizer: bool

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoadCall:
        """Return the call; raises as `SaveCall.of` does."""
        stock = original("checkpointing", "load_checkpoint")
        # Renamed in core 0.12; callers of either age use either name.
        first = next(iter(inspect.signature(stock).parameters))
        renamed = {"model": first, "ddp_model": first}
        named = bind(stock, args, {renamed.get(key, key): value for key, value in kwargs.items()})
        refuse_unknown("load_checkpoint", inspect.signature(stock), named, {first, *LOAD_ARGUMENTS})
        model = named[first]
        return cls(
            model=model if isinstance(model, list) else [model],
            optimizer=named["optimizer"],
            scheduler=named["opt_param_scheduler"],
            load_arg=named["load_arg"],
            strict=named["strict"],
            skip_model_and_optimizer=bool(named.get("skip_load_to_model_and_opt", False)),
        )


def unwrap(model: list[Any]) -> list[Any]:
    """Return the model chunks without their DDP and precision wrappers."""
    unwrapped = checkpointing().unwrap_model(model)
    return unwrapped if isinstance(unwrapped, list) else [unwrapped]
