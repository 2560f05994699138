"""Param groups: how they are told apart, and which group of a checkpoint is which of this job's.

Megatron up to core 0.18 marks a group by four keys, which the groups of `--decoupled-lr` and
`--use-mup` share: they differ in `max_lr`, `min_lr` and `eps` alone. So all that differs between
the groups of a checkpoint tells them apart here, and their order tells apart those that differ in
nothing. Position alone never counts: with expert parallelism there are more sub-optimizers than
without, and a pipeline stage may lack a group that another has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_flashckpt.megatron_lm.old_releases import optimizer_module

Group = dict[str, Any]
Saved = list[dict[str, Any]]
"""Per sub-optimizer `param_groups` (without parameters), `step`, `grad_scaler`."""
Found = tuple[dict[str, Any], Group]
"""Saved entry, saved group."""
Identity = tuple[Any, ...]

#: Module attribute since core 0.14.
IDENTIFIERS: tuple[str, ...] = getattr(
    optimizer_module("optimizer"),
    "param_group_identifier_keys",
    ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"),
)
#: Without expert parallelism experts are in the groups of all others, and the reverse.
EXPERT = "is_expert_parallel"
#: Settings of the job's implementation of a step, which a load does not change.
OWN_SETTINGS = ("capturable", "differentiable", "foreach", "fused")
#: Of a saved group, the global keys of parameters that it held: those that the ranks which are read
#: had anything of. Not in checkpoints that were converted.
HELD = "held_parameters"
#: What training changes.
_CHANGING = ("lr", "weight_decay", "step")


def kept(group: Group) -> Group:
    """Return the entries of a group that are saved: no parameters, classes or functions."""
    return {key: value for key, value in group.items() if key != "params" and not callable(value)}


def setting_names(group: Group) -> frozenset[str]:
    """Return the names of what a group has settings for; every kind of optimizer has its own."""
    return frozenset(kept(group)) - {"step", HELD}


def value_of(group: Group, key: str) -> Any:
    """Return a setting of a group by Megatron's name of it."""
    # NeMo renames the keys that it schedules itself to "pre_...".
    return group.get(key, group.get(f"pre_{key}"))


def identities(groups: Sequence[Group]) -> list[Identity]:
    """Return what tells each group of one sub-optimizer from all others, alike on all ranks.

    Groups that differ in nothing are numbered.
    """
    found: list[Identity] = []
    seen: Counter[frozenset[Any]] = Counter()
    for group in groups:
        settings = frozenset(constants(group).items())
        found.append((settings, seen[settings]))
        seen[settings] += 1
    return found


def constants(group: Group) -> dict[str, Any]:
    """Return what was configured of a group: hashable values by Megatron's names."""
    return {
        plain_name(key): _hashable(value)
        for key, value in kept(group).items()
        if key not in (*_CHANGING, *OWN_SETTINGS, HELD)
    }


def matches(
    mine: Sequence[Group], saved: Saved, held: Sequence[Sequence[str]] = ()
) -> list[Found | None]:
    """Return what `saved` has of each group of this job, in order.

    A group is found by the first of these that some saved group shares with it: all that differs
    between saved groups; the same but for the mark of experts; what Megatron makes groups by, as a
    restart may change rates, and among several of these the parameters that they hold. None: there
    is none, or there are several that differ.

    Args:
        held: the global keys of the parameters that each group of this job holds on this rank.
    """
    known = [(entry, group) for entry in saved for group in entry["param_groups"]]
    telling = differing([group for _, group in known])

    def exact(group: Group) -> Identity:
        settings = constants(group)
        return (*_basics(group), *(settings.get(name) for name in telling))

    def exact_but_expert(group: Group) -> Identity:
        settings = constants(group)
        others = (settings.get(name) for name in telling if name != EXPERT)
        return (*_basics(group)[1:], *others)

    found: list[Found | None] = [None] * len(mine)
    for identity in (exact, exact_but_expert):
        for number, group in enumerate(mine):
            found[number] = found[number] or _in_order(group, identity, mine, known)
    left = [group for group, it in zip(mine, found, strict=True) if it is None]
    taken = {id(it[1]) for it in found if it is not None}
    free = [it for it in known if id(it[1]) not in taken]
    for number, group in enumerate(mine):
        for identity in (_basics, lambda it: _basics(it)[1:]):
            if found[number] is None:
                like = _like(group, identity, known)
                keys = set(held[number]) if held else set()
                rivals = [it for it in left if identity(it) == identity(group)]
                if _are_alike([it for _, it in like]):
                    pass
                elif holders := [it for it in like if not keys.isdisjoint(it[1].get(HELD, ()))]:
                    like = holders
                elif _are_alike(rivals):
                    # Groups that others have matched exactly are not meant for this one.
                    like = _like(group, identity, free)
                found[number] = like[0] if _are_alike([it for _, it in like]) else None
    return found


def differing(groups: Sequence[Group]) -> list[str]:
    """Return the names of the settings that differ between groups."""
    settings = [constants(group) for group in groups]
    names = sorted({name for it in settings for name in it})
    return [name for name in names if len({it.get(name) for it in settings}) > 1]


def described(group: Group, telling: Sequence[str]) -> str:
    """Return a group for a message.

    Args:
        telling: the settings that differ between groups.
    """
    settings = constants(group)
    names = dict.fromkeys([*IDENTIFIERS, *telling])
    return "(" + ", ".join(f"{name} {settings.get(name)}" for name in names) + ")"


def _basics(group: Group) -> Identity:
    """Return what Megatron makes groups by, whatever the rates, in every release; experts first."""
    # The mark of embeddings is `is_decoupled_lr` up to core 0.15, and `default_config` since.
    scheduled_apart = value_of(group, "is_decoupled_lr") or group.get("default_config") is False
    return (
        bool(value_of(group, EXPERT)),
        value_of(group, "wd_mult"),
        value_of(group, "lr_mult"),
        bool(scheduled_apart),
    )


def _like(group: Group, identity: Callable[[Group], Identity], known: list[Found]) -> list[Found]:
    """Return the saved groups of the same identity.

    Groups of different optimizers may share it; Muon's are told from Adam's by what they hold.
    """
    like = [it for it in known if identity(it[1]) == identity(group)]
    same_kind = [it for it in like if setting_names(it[1]) == setting_names(group)]
    return same_kind or like


def _in_order(
    group: Group,
    identity: Callable[[Group], Identity],
    mine: Sequence[Group],
    known: list[Found],
) -> Found | None:
    like = _like(group, identity, known)
    if _are_alike([it for _, it in like]):
        return like[0]
    peers = [it for it in mine if identity(it) == identity(group)]
    if len(peers) != len(like):
        return None
    return like[next(number for number, it in enumerate(peers) if it is group)]


def _are_alike(groups: list[Group]) -> bool:
    """Return whether there is a group, and all have the same settings but for steps and experts."""
    settings = {
        frozenset(
            (plain_name(key), _hashable(value))
            for key, value in kept(group).items()
            if key not in (EXPERT, f"pre_{EXPERT}", "step", HELD)
        )
        for group in groups
    }
    return len(settings) == 1


def plain_name(key: str) -> str:
    """Return Megatron's name of a setting that NeMo may have renamed."""
    return key.removeprefix("pre_")


def _hashable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        numbers = value.reshape(-1).tolist()
        return numbers[0] if len(numbers) == 1 else tuple(numbers)
    if isinstance(value, list | tuple):
        return tuple(_hashable(it) for it in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(it)) for key, it in value.items())
    return value
