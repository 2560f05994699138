"""What an optimizer keeps beside tensors: param groups, steps, the grad scaler.

A checkpoint's groups are matched to this job's by what makes a group a group (Megatron's
`param_group_identifier_keys`), never by position alone: with expert parallelism there are more
sub-optimizers than without, and a pipeline stage may lack a group that another has.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch

from megatron_flashckpt.errors import MissingStateError, UnsupportedError
from megatron_flashckpt.megatron_lm.offload import (
    below,
    finish_loading,
    groups_below,
    is_offloading,
)
from megatron_flashckpt.megatron_lm.optimizer_state import sub_optimizers
from megatron_flashckpt.megatron_lm.stock import OPTIMIZER_HOMES, stock_module

#: Module attribute since core 0.14.
IDENTIFIERS: tuple[str, ...] = getattr(
    stock_module("optimizer.optimizer", OPTIMIZER_HOMES),
    "param_group_identifier_keys",
    ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"),
)
#: Without expert parallelism experts are in the groups of all others, and the reverse.
_EXPERT = "is_expert_parallel"
#: What makes groups differ in every release.
_BASIC = ("wd_mult", "lr_mult", "is_decoupled_lr")

#: Settings of the job's implementation of a step, which a load does not change.
_OWN_SETTINGS = ("capturable", "differentiable", "foreach", "fused")

#: Says of an entry that there is no step although there are parameters; not in older checkpoints.
_NO_STEP_MADE = "no_step_made"

_Saved = list[dict[str, Any]]
_Identity = tuple[Any, ...]
_Family = tuple[frozenset[str], bool]
"""The settings of groups that step together, and whether they are of experts."""


def hyper_parameters(optimizer: Any) -> _Saved:
    """Return, per sub-optimizer, its param groups without the params, steps and grad scaler."""
    saved = []
    for sub in sub_optimizers(optimizer):
        inner = sub.optimizer
        scaler = getattr(sub, "grad_scaler", None)
        entry = {
            "param_groups": [_kept(group) for group in inner.param_groups],
            "step": _step_below(inner),
            "grad_scaler": scaler.state_dict() if scaler else None,
        }
        has_parameters = any(group["params"] for group in inner.param_groups)
        if has_parameters and all(_step_of(entry, it) is None for it in entry["param_groups"]):
            entry[_NO_STEP_MADE] = True
        saved.append(entry)
    return saved


def _kept(group: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a group that are saved: no parameters, classes or functions."""
    return {key: value for key, value in group.items() if key != "params" and not callable(value)}


def _step_below(inner: torch.optim.Optimizer) -> Any:
    """Return the step if it is not in the param groups: torch's optimizers keep it per parameter.

    (Apex and TE: per group; but with --optimizer-cpu-offload in groups below those that we see.)

    Raises:
        UnsupportedError: parameters have taken different numbers of steps.
    """
    steps = {
        float(state["step"])
        for optimizer in below(inner)
        for state in optimizer.state.values()
        if isinstance(state.get("step"), torch.Tensor)
    }
    if is_offloading(inner):
        groups = (group for optimizer in below(inner) for group in optimizer.param_groups)
        steps |= {float(group["step"]) for group in groups if "step" in group}
    if len(steps) > 1:
        raise UnsupportedError(
            f"parameters of one {type(inner).__name__} have different steps {sorted(steps)}"
        )
    return steps.pop() if steps else None


def merge(of_ranks: list[_Saved]) -> _Saved:
    """Return the groups of all ranks together, each identity once, with its step.

    Args:
        of_ranks: what `hyper_parameters` returned on ranks that between them hold all of the model.
    """
    merged: _Saved = []
    made = _steps_made(entry for saved in of_ranks for entry in saved)
    seen: set[tuple[int, _Identity]] = set()
    for saved in of_ranks:
        for number, entry in enumerate(saved):
            fresh = []
            for group in entry["param_groups"]:
                if (number, _identity(group)) not in seen:
                    seen.add((number, _identity(group)))
                    fresh.append(group)
            if fresh:
                merged.append(_counted(entry, fresh, made))
    return merged


def completed(saved: _Saved, others: _Saved) -> _Saved:
    """Return `saved` with steps from `others` where its rank had no parameters to count with."""
    made = _steps_made(others)
    return [_counted(entry, entry["param_groups"], made) for entry in saved]


def _counted(entry: dict[str, Any], groups: list[dict[str, Any]], made: _Counts) -> dict[str, Any]:
    """Return an entry of these groups, each with a step if `made` has one for it."""
    known = [
        {**group, "step": others}
        if _step_of(entry, group) is None and (others := made.of(group)) is not None
        else group
        for group in groups
    ]
    counted = {**entry, "param_groups": known}
    if any(made.by_family.get(_family(group), 0) is None for group in groups):
        counted[_NO_STEP_MADE] = True
    return counted


def check(optimizer: Any, saved: _Saved) -> None:
    """Raise unless `load_hyper_parameters` can set all groups; changes nothing.

    Raises:
        MissingStateError: this job has groups that the checkpoint has nothing like; all are named.
    """
    matches = _matches(sub_optimizers(optimizer), saved)
    lost = [_described(group) for _, group, found in matches if found is None and group["params"]]
    if lost:
        known = [_described(group) for entry in saved for group in entry["param_groups"]]
        raise MissingStateError(
            f"the checkpoint has no param group like {', '.join(lost)}; it has {', '.join(known)}; "
            "use the optimizer settings of the saving run, or --no-load-optim"
        )


def load_hyper_parameters(optimizer: Any, saved: _Saved) -> None:
    """Set what `hyper_parameters` or `merge` returned; state tensors must be allocated already."""
    made = _steps_made(saved)
    for inner, group, found in _matches(sub_optimizers(optimizer), saved):
        if found is not None:
            entry, values = found
            step = _step_of(entry, values)
            _take(inner, group, values, made.of(values) if step is None else step)
    scalers = [entry["grad_scaler"] for entry in saved if entry["grad_scaler"] is not None]
    for sub in sub_optimizers(optimizer):
        scaler = getattr(sub, "grad_scaler", None)
        if scaler and scalers:
            scaler.load_state_dict(scalers[0])
        finish_loading(sub.optimizer)


def knows_steps(saved: _Saved) -> bool:
    """Return whether `saved` says how many steps were made.

    A rank whose optimizer has no parameters (only padding fell to it) does not know.
    """
    return bool(_steps_made(saved).by_settings)


_Found = tuple[dict[str, Any], dict[str, Any]]
"""Saved entry, saved group."""


def _matches(
    subs: list[Any], saved: _Saved
) -> list[tuple[torch.optim.Optimizer, dict[str, Any], _Found | None]]:
    """Return `(inner optimizer, its group, what is saved of it)` for every group."""
    mine = [[_identity(group) for group in sub.optimizer.param_groups] for sub in subs]
    theirs = [[_identity(group) for group in entry["param_groups"]] for entry in saved]
    known = [(entry, group) for entry in saved for group in entry["param_groups"]]
    return [
        (
            sub.optimizer,
            group,
            (saved[number], saved[number]["param_groups"][position])
            if mine == theirs
            else _like(group, known),
        )
        for number, sub in enumerate(subs)
        for position, group in enumerate(sub.optimizer.param_groups)
    ]


def _like(group: dict[str, Any], known: list[_Found]) -> _Found | None:
    """Return what `known` has of `group`; None if there is nothing, or no telling which."""
    # Groups of different optimizers may have one identity; Muon's are told from Adam's by what they
    # hold.
    known = sorted(known, key=lambda found: _settings(found[1]) != _settings(group))
    for without in ("", _EXPERT):
        for found in known:
            if _identity(found[1], without) == _identity(group, without):
                return found
    # Since core 0.19 learning rates are part of the identity, but a restart may change them.
    near = [found for found in known if _basics(found[1]) == _basics(group)]
    alike = {_identity(found[1], _EXPERT) for found in near}
    return near[0] if len(alike) == 1 else None


def _basics(group: dict[str, Any]) -> _Identity:
    return tuple(_value(group, key) for key in _BASIC)


def _identity(group: dict[str, Any], without: str = "") -> _Identity:
    return tuple(_value(group, key) for key in IDENTIFIERS if key != without)


def _value(group: dict[str, Any], key: str) -> Any:
    # NeMo renames the keys that it schedules itself to "pre_...".
    return group.get(key, group.get(f"pre_{key}"))


def _described(group: dict[str, Any]) -> str:
    said = zip(IDENTIFIERS, _identity(group), strict=True)
    return "(" + ", ".join(f"{key} {value}" for key, value in said) + ")"


def _step_of(entry: dict[str, Any], group: dict[str, Any]) -> Any:
    return group.get("step") if entry["step"] is None else entry["step"]


@dataclasses.dataclass(frozen=True)
class _Counts:
    """How many steps there were."""

    by_family: dict[_Family, Any] = dataclasses.field(default_factory=dict)
    """None: none, though there are parameters."""
    by_settings: dict[frozenset[str], Any] = dataclasses.field(default_factory=dict)

    def of(self, group: dict[str, Any]) -> Any:
        """Return the steps of a group whose own rank does not know; None: there were none."""
        family = _family(group)
        return self.by_family.get(family, self.by_settings.get(family[0]))


def _steps_made(saved: Iterable[dict[str, Any]]) -> _Counts:
    """Return what all entries together know of steps.

    Groups of a family step together, but one without parameters on its rank does not count there.
    Experts have an optimizer of their own, with its own count; Muon, whose groups have other
    settings than Adam's, never counts.
    """
    made = _Counts()
    groups = [(entry, group) for entry in saved for group in entry["param_groups"]]
    for entry, group in groups:
        if (step := _step_of(entry, group)) is not None:
            made.by_family.setdefault(_family(group), step)
            made.by_settings.setdefault(_settings(group), step)
    for entry, group in groups:
        if entry.get(_NO_STEP_MADE):
            made.by_family.setdefault(_family(group), None)
    return made


def _family(group: dict[str, Any]) -> _Family:
    return _settings(group), bool(_value(group, _EXPERT))


def _settings(group: dict[str, Any]) -> frozenset[str]:
    return frozenset(_kept(group)) - {"step"}


def _take(
    inner: torch.optim.Optimizer, group: dict[str, Any], values: dict[str, Any], step: Any
) -> None:
    kept = (*IDENTIFIERS, *(f"pre_{key}" for key in IDENTIFIERS), *_OWN_SETTINGS, "params", "step")
    taken = {
        key: _overwritten(group.get(key), value, _device(group))
        for key, value in values.items()
        if key not in kept
    }
    group.update(taken)
    if step is None:
        return
    for optimizer, stepped in groups_below(inner, group):
        if type(optimizer).__module__.startswith("torch.optim"):
            _set_steps_of_parameters(optimizer, stepped, float(step))
        else:
            _set_step_of_group(optimizer, stepped, step)


def _set_steps_of_parameters(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], step: float
) -> None:
    on_device = group.get("capturable") or group.get("fused")
    for parameter in group["params"]:
        state = optimizer.state[parameter]
        # A new tensor for each parameter: a shared one would count the steps of all of them.
        tensor = torch.tensor(step, dtype=torch.float32)
        device = parameter.device if on_device else tensor.device
        state["step"] = _overwritten(state.get("step"), tensor, device)


def _set_step_of_group(optimizer: Any, group: dict[str, Any], step: Any) -> None:
    """Set the step as Apex's and TransformerEngine's optimizers keep it."""
    if getattr(optimizer, "capturable", isinstance(step, torch.Tensor)):
        tensor = step if isinstance(step, torch.Tensor) else torch.tensor([step], dtype=torch.int32)
        group["step"] = _overwritten(group.get("step"), tensor, _device(group))
    else:
        group["step"] = int(step)


def _device(group: dict[str, Any]) -> torch.device:
    """Return the device of the group's parameters; the CPU for a group without parameters."""
    return next((parameter.device for parameter in group["params"]), torch.device("cpu"))


def _overwritten(current: Any, value: Any, device: torch.device) -> Any:
    """Return `value` in the form of `current`, shared with no other group.

    If `current` is a tensor, overwrite and return it: optimizers change tensors in place, and a
    CUDA graph reads the tensors that it captured.

    Args:
        device: of the returned tensor if `current` is no tensor.
    """
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor | int | float):
        new = torch.as_tensor(value, dtype=current.dtype)
        if new.numel() == current.numel():
            with torch.no_grad():
                current.copy_(new.reshape(current.shape))
            return current
    if isinstance(value, torch.Tensor):
        is_number = isinstance(current, int | float) and value.numel() == 1
        return value.item() if is_number else value.clone().to(device)
    if type(value) in (list, tuple):
        olds = current if isinstance(current, list | tuple) else ()
        pairs = itertools.zip_longest(olds[: len(value)], value)
        return type(value)(_overwritten(old, new, device) for old, new in pairs)
    return copy.deepcopy(value)
