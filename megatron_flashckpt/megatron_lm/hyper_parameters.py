"""State of an optimizer other than tensors: param groups, steps, the grad scaler."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Iterable
from typing import Any

import torch

from megatron_flashckpt.errors import MissingStateError, UnsupportedError
from megatron_flashckpt.megatron_lm.cpu_offload import (
    below,
    finish_loading,
    groups_below,
    is_offloading,
)
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.optimizer_state import sub_optimizers
from megatron_flashckpt.megatron_lm.param_groups import (
    EXPERT,
    HELD,
    IDENTIFIERS,
    OWN_SETTINGS,
    Identity,
    Match,
    Saved,
    constants,
    described,
    differing,
    identities,
    kept,
    matches,
    setting_names,
    value_of,
)

#: Key of an entry that has parameters but no step yet; older checkpoints do not have it.
_NO_STEP_MADE = "no_step_made"

_step_in = operator.methodcaller("get", "step")
_Family = tuple[frozenset[str], bool]
"""Names of the settings of groups that step together, and whether the groups have experts."""


def hyper_parameters(optimizer: Any, geometry: ModelGeometry | None = None) -> Saved:
    """Return param groups (without params), step and grad scaler of each sub-optimizer.

    Args:
        geometry: if given, every group also names the parameters that it holds on this rank.
    """
    saved = []
    for sub in sub_optimizers(optimizer):
        inner = sub.optimizer
        scaler = getattr(sub, "grad_scaler", None)
        entry = {
            "param_groups": [kept(group) for group in inner.param_groups],
            "step": _step_below(inner),
            "grad_scaler": scaler.state_dict() if scaler else None,
        }
        if geometry is not None:
            for group, keys in zip(entry["param_groups"], geometry.held_keys(sub), strict=True):
                group[HELD] = keys
        has_parameters = any(group["params"] for group in inner.param_groups)
        if has_parameters and all(_step_of(entry, g) is None for g in entry["param_groups"]):
            entry[_NO_STEP_MADE] = True
        saved.append(entry)
    return saved


def _step_below(inner: torch.optim.Optimizer) -> Any:
    """Return the step if it is outside the param groups of `inner`, else None.

    Torch's optimizers keep the step per parameter, Apex and TransformerEngine per group. With
    --optimizer-cpu-offload it is in the groups of the sub-optimizers.

    Raises:
        UnsupportedError: parameters have different numbers of steps.
    """
    steps = {
        float(step)
        for optimizer in below(inner)
        for step in map(_step_in, optimizer.state.values())
        if step is not None and isinstance(step, torch.Tensor)
    }
    if is_offloading(inner):
        groups = (group for optimizer in below(inner) for group in optimizer.param_groups)
        steps |= {float(group["step"]) for group in groups if "step" in group}
    if len(steps) > 1:
        raise UnsupportedError(
            f"parameters of one {type(inner).__name__} have different steps {sorted(steps)}, but a "
            "checkpoint has one for all of them; give each group of parameters that starts later "
            "an optimizer of its own, or keep Megatron's own checkpointing for this job"
        )
    return steps.pop() if steps else None


def merge(of_ranks: list[Saved]) -> Saved:
    """Return the groups of all ranks, each identity once, with its step.

    Args:
        of_ranks: results of `hyper_parameters` on ranks that together hold the complete model.
    """
    merged: Saved = []
    made = _steps_made(entry for saved in of_ranks for entry in saved)
    held = _held(of_ranks)
    seen: set[tuple[int, Identity]] = set()
    for saved in of_ranks:
        for number, entry in enumerate(saved):
            fresh = []
            groups = entry["param_groups"]
            for group, identity in zip(groups, identities(groups), strict=True):
                if (number, identity) not in seen:
                    seen.add((number, identity))
                    fresh.append(_with_held(group, held.get(identity)))
            if fresh:
                merged.append(_with_steps(entry, fresh, made))
    return merged


def completed(saved: Saved, others: Saved) -> Saved:
    """Return `saved`, completed with data from `others` that its rank did not have.

    These are the steps of groups without parameters on that rank, and the parameters that groups
    hold on other ranks.
    """
    made = _steps_made(others)
    held = _held([saved, others])
    entries = []
    for entry in saved:
        groups = entry["param_groups"]
        known = [
            _with_held(group, held.get(identity))
            for group, identity in zip(groups, identities(groups), strict=True)
        ]
        entries.append(_with_steps(entry, known, made))
    return entries


def without_held(saved: Saved) -> Saved:
    """Return `saved` with groups in Megatron's form, without names of parameters."""
    return [
        {**entry, "param_groups": [_with_held(group, None) for group in entry["param_groups"]]}
        for entry in saved
    ]


def _held(of_ranks: list[Saved]) -> dict[Identity, set[str]]:
    """Return the parameters that groups hold on all ranks together, by identity."""
    held: dict[Identity, set[str]] = {}
    for saved in of_ranks:
        for entry in saved:
            groups = entry["param_groups"]
            for group, identity in zip(groups, identities(groups), strict=True):
                if HELD in group:
                    held.setdefault(identity, set()).update(group[HELD])
    return held


def _with_held(group: dict[str, Any], keys: set[str] | None) -> dict[str, Any]:
    """Return the group with the names `keys` of its parameters; without names if None."""
    bare = {name: value for name, value in group.items() if name != HELD}
    return bare if keys is None else {**bare, HELD: sorted(keys)}


def _with_steps(
    entry: dict[str, Any], groups: list[dict[str, Any]], made: _Counts
) -> dict[str, Any]:
    """Return `entry` with `groups`; a group without a step gets the step in `made`, if any."""
    known = [
        {**group, "step": step}
        if _step_of(entry, group) is None and (step := made.of(group)) is not None
        else group
        for group in groups
    ]
    counted = {**entry, "param_groups": known}
    if any(made.by_family.get(_family(group), 0) is None for group in groups):
        counted[_NO_STEP_MADE] = True
    return counted


def check(optimizer: Any, saved: Saved, geometry: ModelGeometry | None = None) -> None:
    """Raise if `load_hyper_parameters` cannot set all groups; change nothing.

    Raises:
        MissingStateError: the checkpoint has no group for a group of this job, or several
            candidates; names all such groups.
    """
    unmatched = [
        group
        for _, group, match in _matches(optimizer, saved, geometry)
        if not match and group["params"]
    ]
    if unmatched:
        known = [group for entry in saved for group in entry["param_groups"]]
        differing_names = differing(known)
        raise MissingStateError(
            "the checkpoint has no param group that is certainly meant for "
            f"{', '.join(described(group, differing_names) for group in unmatched)}; it has "
            f"{', '.join(described(group, differing_names) for group in known)}; use the optimizer "
            "settings of the saving run, or --no-load-optim"
        )


def load_hyper_parameters(
    optimizer: Any, saved: Saved, geometry: ModelGeometry | None = None
) -> list[str]:
    """Set a result of `hyper_parameters` or `merge`; state tensors must be allocated already.

    Args:
        geometry: geometry of the model; if given, groups can be matched by their parameters.

    Returns:
        A line for each group of this job whose configured settings the checkpoint replaces.
    """
    changes = []
    scalers: dict[int, Any] = {}
    made = _steps_made(saved)
    for inner, group, match in _matches(optimizer, saved, geometry):
        if match is not None:
            entry, values = match
            if entry["grad_scaler"] is not None:
                scalers.setdefault(id(inner), entry["grad_scaler"])
            step = _step_of(entry, values)
            configured = constants(group)
            _apply(inner, group, values, made.of(values) if step is None else step)
            loaded = constants(group)
            changed = [name for name, value in configured.items() if loaded[name] != value]
            if changed:
                taken = ", ".join(
                    f"{name} {loaded[name]} instead of {configured[name]}" for name in changed
                )
                changes.append(f"param group {described(group, ())} takes {taken}")
    scaler_states = (entry["grad_scaler"] for entry in saved)
    first = next((state for state in scaler_states if state is not None), None)
    for sub in sub_optimizers(optimizer):
        scaler = getattr(sub, "grad_scaler", None)
        # Chained optimizers may have different scaler states: each checks only its own gradients.
        state = scalers.get(id(sub.optimizer), first)
        if scaler and state is not None:
            scaler.load_state_dict(state)
        finish_loading(sub.optimizer)
    return changes


def knows_steps(saved: Saved) -> bool:
    """Return whether `saved` contains the number of steps.

    It does not on a rank whose optimizer has no parameters (its range is only padding).
    """
    return bool(_steps_made(saved).by_settings)


def _matches(
    optimizer: Any, saved: Saved, geometry: ModelGeometry | None
) -> list[tuple[torch.optim.Optimizer, dict[str, Any], Match | None]]:
    """Return `(inner optimizer, its group, saved match)` for every group of this job."""
    subs = sub_optimizers(optimizer)
    pairs = [(sub.optimizer, group) for sub in subs for group in sub.optimizer.param_groups]
    held = () if geometry is None else [keys for sub in subs for keys in geometry.held_keys(sub)]
    saved_matches = matches([group for _, group in pairs], saved, held)
    return [(*pair, match) for pair, match in zip(pairs, saved_matches, strict=True)]


def _step_of(entry: dict[str, Any], group: dict[str, Any]) -> Any:
    return group.get("step") if entry["step"] is None else entry["step"]


@dataclasses.dataclass(frozen=True)
class _Counts:
    """Numbers of steps."""

    by_family: dict[_Family, Any] = dataclasses.field(default_factory=dict)
    """Steps by family; None if the family has parameters but no step."""
    by_settings: dict[frozenset[str], Any] = dataclasses.field(default_factory=dict)
    """Steps by names of settings, for families without a number of their own."""

    def of(self, group: dict[str, Any]) -> Any:
        """Return the steps of a group whose own rank has no number; None without any step."""
        family = _family(group)
        return self.by_family.get(family, self.by_settings.get(family[0]))


def _steps_made(saved: Iterable[dict[str, Any]]) -> _Counts:
    """Return the numbers of steps from all entries together.

    Groups of a family step together, but a group without parameters on its rank counts no steps
    there. Experts have a separate optimizer with a separate count. Muon counts no steps; its groups
    have other settings than Adam's.
    """
    made = _Counts()
    groups = [(entry, group) for entry in saved for group in entry["param_groups"]]
    for entry, group in groups:
        if (step := _step_of(entry, group)) is not None:
            made.by_family.setdefault(_family(group), step)
            made.by_settings.setdefault(setting_names(group), step)
    for entry, group in groups:
        if entry.get(_NO_STEP_MADE):
            made.by_family.setdefault(_family(group), None)
    return made


def _family(group: dict[str, Any]) -> _Family:
    return setting_names(group), bool(value_of(group, EXPERT))


def _apply(
    inner: torch.optim.Optimizer, group: dict[str, Any], values: dict[str, Any], step: Any
) -> None:
    own = (*IDENTIFIERS, *(f"pre_{key}" for key in IDENTIFIERS), *OWN_SETTINGS)
    own += ("params", "step", HELD)
    taken = {
        key: _overwritten(group.get(key), value, _device(group))
        for key, value in values.items()
        if key not in own
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
    """Set the step in the form of Apex's and TransformerEngine's optimizers."""
    if getattr(optimizer, "capturable", isinstance(step, torch.Tensor)):
        tensor = step if isinstance(step, torch.Tensor) else torch.tensor([step], dtype=torch.int32)
        group["step"] = _overwritten(group.get("step"), tensor, _device(group))
    else:
        group["step"] = int(step)


def _device(group: dict[str, Any]) -> torch.device:
    """Return the device of the group's parameters; the CPU for a group without parameters."""
    return next((parameter.device for parameter in group["params"]), torch.device("cpu"))


def _overwritten(current: Any, value: Any, device: torch.device) -> Any:
    """Return `value` in the form of `current`, as an object that no other group shares.

    If `current` is a tensor, overwrite and return it: optimizers change tensors in place, and a
    CUDA graph reads the tensors that were captured.

    Args:
        device: device of the returned tensor if `current` is no tensor.
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
