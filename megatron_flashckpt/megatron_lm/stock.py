"""Megatron's own checkpointing module of any release, and calls bound to its signatures.

Versions are not parsed. Names that the stock module imports (`get_args`, `unwrap_model`) are taken
from that module, and arguments are bound to the signature of the stock function. `compat` handles
features of some releases, `old_releases` the differences of releases before core 0.7.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.megatron_lm.old_releases import TRAINING_PACKAGES, training_package


@functools.cache
def stock_module(name: str) -> ModuleType:
    """Return Megatron's own module `name` (`checkpointing`, `async_utils`, `training`).

    Cached: the training loop asks for Megatron's args in every iteration.

    Raises:
        UnsupportedError: no Megatron-LM training code can be imported.
    """
    path = f"{training_package()}.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        # A missing dependency of Megatron must not be reported as a missing Megatron.
        if error.name is None or not path.startswith(error.name):
            raise
    paths = " or ".join(f"{package}.{name}" for package in TRAINING_PACKAGES)
    raise UnsupportedError(
        f"no {paths} can be imported: run from a "
        "Megatron-LM checkout, or install megatron-core >= 0.17, whose wheel has "
        "megatron.training; or use megatron_flashckpt.Checkpointer in a training loop of your own"
    )


_ORIGINALS: dict[tuple[str, str], Callable[..., Any]] = {}


def replace(module: str, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a stock function, so that a training script needs no edit.

    Modules of Megatron, and those of programs that have a loop of their own, import the function by
    name. So the name is replaced in all modules but ours. `original` still returns the stock
    function.
    """
    stock = _ORIGINALS.setdefault((module, name), getattr(stock_module(module), name))
    stock_module("training")  # imports all modules that call these functions
    for key, importer in list(sys.modules.items()):
        names = getattr(importer, "__dict__", {})
        if names.get(name) is stock and key.partition(".")[0] != "megatron_flashckpt":
            setattr(importer, name, replacement)


def original(module: str, name: str) -> Callable[..., Any]:
    """Return Megatron's own function, also after `replace`."""
    return _ORIGINALS.get((module, name)) or getattr(stock_module(module), name)


def checkpointing() -> ModuleType:
    """Return Megatron's own `checkpointing` module."""
    return stock_module("checkpointing")


def get_args() -> Any:
    """Return Megatron's args.

    Raises:
        UnsupportedError: the job has none.
    """
    try:
        return checkpointing().get_args()
    except AssertionError as error:
        raise UnsupportedError(
            "Megatron's args are not initialized, but its save_checkpoint or load_checkpoint is "
            "called: a training loop of its own uses megatron_flashckpt.Checkpointer instead; "
            "Megatron's own functions need initialize_megatron first"
        ) from error


def is_replaced(module: str, name: str) -> bool:
    """Return whether `replace` has replaced the function."""
    return (module, name) in _ORIGINALS


def loaded(name: str) -> ModuleType | None:
    """Return `stock_module(name)` if something has imported it already."""
    return sys.modules.get(f"{training_package()}.{name}")


def entry_point() -> str:
    """Return a description of the entry point that the training script uses."""
    if is_replaced("checkpointing", "save_checkpoint"):
        return "through the launcher"
    training = loaded("training")
    if training is not None and _is_ours(getattr(training, "save_checkpoint", None)):
        return f"by the imports of {training.__file__}"
    return "called by the training script itself"


def half_swapped() -> str | None:
    """Return a message if only one of the two imports was swapped, else None."""
    training = loaded("training")
    names = ("save_checkpoint", "load_checkpoint")
    functions = {name: getattr(training, name, None) for name in names}
    ours = [name for name in names if _is_ours(functions[name])]
    stock = [name for name in names if functions[name] is original("checkpointing", name)]
    if training is None or not ours or not stock:
        return None
    return (
        f"{training.__file__} has {ours[0]} from megatron_flashckpt, but {stock[0]} from Megatron: "
        "swap both imports"
    )


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("megatron_flashckpt")


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments by the parameter names of this release's `function`, with defaults.

    Raises:
        TypeError: this release does not have an argument.
    """
    bound = _signature_of(function).bind_partial(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


_signature_of = functools.cache(inspect.signature)


def argument(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return one argument of a call or its default; None if this release does not have it.

    For the shims that the training loop calls in every iteration: `bind` takes 16 to 44 us there.
    """
    if name in kwargs:
        return kwargs[name]
    position, default = _place_of(function, name)
    return args[position] if position < len(args) else default


@functools.cache
def _place_of(function: Callable[..., Any], name: str) -> tuple[int, Any]:
    """Return the position and the default of a parameter; a missing one is behind all others."""
    parameters = _signature_of(function).parameters
    if name not in parameters:
        return sys.maxsize, None
    return list(parameters).index(name), parameters[name].default


#: Arguments that the shims act on, by Megatron's names: of every release, then of later ones.
SAVE_REQUIRED: tuple[str, ...] = (
    *("iteration", "model", "optimizer", "opt_param_scheduler"),
    "num_floating_point_operations_so_far",
)
SAVE_ARGUMENTS = (*SAVE_REQUIRED, "non_persistent_ckpt", "train_data_iterator", "release")
#: Without the first parameter, the model, which core 0.12 renamed.
LOAD_REQUIRED = ("optimizer", "opt_param_scheduler", "load_arg", "strict")
LOAD_ARGUMENTS = (*LOAD_REQUIRED, "skip_load_to_model_and_opt")


#: These control how Megatron writes its own formats and finds its local checkpoints.
_NOT_NEEDED = frozenset(
    {"checkpointing_context", "preprocess_common_state_dict_fn", "ft_client", "terminate"}
)


def _refuse_unknown(function: str, named: dict[str, Any], used: Collection[str]) -> None:
    """Raise if an argument outside `used` matters and differs from its default.

    A request of a newer Megatron must not be ignored silently.

    Args:
        named: the arguments by name, with or without defaults.
        used: names of the parameters that the shim acts on.

    Raises:
        UnsupportedError: names all such arguments.
    """
    unknown = []
    parameters = _signature_of(original("checkpointing", function)).parameters
    for name, value in named.items():
        if name in used or name in _NOT_NEEDED or _is_default(value, parameters[name]):
            continue
        own = _OWN_GROUPS.get(name)
        if own is None or not _is_same_group(value, own()):
            unknown.append(f"{name}={_shown(value)}")
    if unknown:
        raise UnsupportedError(
            f"{function} was called with {', '.join(unknown)}, which this release of "
            "megatron_flashckpt does not know how to follow; leave it at its default, or keep "
            "Megatron's own checkpointing for this call"
        )


#: Since core 0.16 callers may pass process groups; the job's own groups are accepted.
_OWN_GROUPS: dict[str, Callable[[], Any]] = {
    "tp_group": parallel_state.get_tensor_model_parallel_group,
    "pp_group": parallel_state.get_pipeline_model_parallel_group,
    "dp_cp_group": parallel.data_parallel_group,
    "dp_group": lambda: parallel.data_parallel_group(with_context_parallel=False),
    "expt_dp_group": parallel.expert_data_parallel_group,
}


def _is_same_group(one: Any, other: Any) -> bool:
    return one is other or (
        isinstance(one, dist.ProcessGroup)
        and dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)
    )


def _is_default(value: Any, parameter: inspect.Parameter) -> bool:
    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return not value
    # Not `==` alone: comparing tensors returns a tensor.
    return value is parameter.default or (
        isinstance(value, str | int | float) and bool(value == parameter.default)
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@dataclasses.dataclass(frozen=True)
class SaveCall:
    """Arguments of `save_checkpoint` under names that are independent of the release."""

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
        """Return the call. For a release checkpoint, which Megatron itself saves, skip the check.

        Raises:
            TypeError: this release of Megatron does not have an argument.
            UnsupportedError: an argument that the shim does not know is not at its default.
        """
        named = bind(original("checkpointing", "save_checkpoint"), args, kwargs)
        if not named.get("release", False):
            _refuse_unknown("save_checkpoint", named, SAVE_ARGUMENTS)
        return cls(
            iteration=int(named["iteration"]),
            model=named["model"] if isinstance(named["model"], list) else [named["model"]],
            optimizer=named["optimizer"],
            scheduler=named["opt_param_scheduler"],
            # Megatron's autoresume path omits this argument.
            floating_point_operations=named.get("num_floating_point_operations_so_far", 0),
            non_persistent=bool(named.get("non_persistent_ckpt", False)),
            release=bool(named.get("release", False)),
            data_iterator=named.get("train_data_iterator"),
        )


@dataclasses.dataclass(frozen=True)
class LoadCall:
    """Arguments of `load_checkpoint` under names that are independent of the release."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    load_arg: str
    strict: bool
    skip_model_and_optimizer: bool

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoadCall:
        """Return the call; raise the errors of `SaveCall.of`."""
        stock = original("checkpointing", "load_checkpoint")
        # Core 0.12 renamed the parameter; callers use either name.
        first = next(iter(inspect.signature(stock).parameters))
        renamed = {"model": first, "ddp_model": first}
        named = bind(stock, args, {renamed.get(key, key): value for key, value in kwargs.items()})
        _refuse_unknown("load_checkpoint", named, {first, *LOAD_ARGUMENTS})
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
