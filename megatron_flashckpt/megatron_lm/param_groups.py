"""Param groups: their identities, and matches between groups of a checkpoint and of this job.

Megatron up to core 0.18 identifies a group by four keys. The groups of `--decoupled-lr` and
`--use-mup` share these keys: they differ only in `max_lr`, `min_lr` and `eps`. So this module
distinguishes groups by all settings that differ, and equal groups by their order. Position alone is
never used: expert parallelism adds sub-optimizers, and pipeline stages may have different groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

Group = dict[str, Any]
Saved = list[dict[str, Any]]
"""One entry per sub-optimizer: `param_groups` (without parameters), `step`, `grad_scaler`."""
Match = tuple[dict[str, Any], Group]
"""Saved entry, saved group."""
Identity = tuple[Any, ...]

#: Marks of a group that are not rates. Core 0.19 counts rates among its own keys, and so refuses
#: every new `--lr`; here a group has the same identity in all releases.
IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
#: Mark of groups of experts. Without expert parallelism experts share the groups of others.
EXPERT = "is_expert_parallel"
#: Settings of the step's implementation in this job; a load does not change them. `optimizer` names
#: the class of a group's optimizer since core 0.19.
OWN_SETTINGS = ("capturable", "differentiable", "foreach", "fused", "optimizer")
#: Key of a saved group: global keys of the parameters that it held on the ranks that are read.
#: Converted checkpoints do not have it.
HELD = "held_parameters"
#: Settings that training changes.
_CHANGING = ("lr", "weight_decay", "step")


def kept(group: Group) -> Group:
    """Return the entries of a group that are saved: no parameters, classes or functions."""
    return {key: value for key, value in group.items() if key != "params" and not callable(value)}


def setting_names(group: Group) -> frozenset[str]:
    """Return the names of a group's settings; every class of optimizer has its own set."""
    return frozenset(kept(group)) - {"step", HELD}


def value_of(group: Group, key: str) -> Any:
    """Return a setting of a group by Megatron's name."""
    # NeMo renames the keys that it schedules itself to "pre_...".
    return group.get(key, group.get(f"pre_{key}"))


def identities(groups: Sequence[Group]) -> list[Identity]:
    """Return the identities of the groups of one sub-optimizer; they are equal on all ranks.

    Groups with equal settings are numbered.
    """
    result: list[Identity] = []
    seen: Counter[frozenset[Any]] = Counter()
    for group in groups:
        settings = frozenset(constants(group).items())
        result.append((settings, seen[settings]))
        seen[settings] += 1
    return result


def constants(group: Group) -> dict[str, Any]:
    """Return the configured settings of a group: hashable values by Megatron's names."""
    return {
        plain_name(key): _hashable(value)
        for key, value in kept(group).items()
        if key not in (*_CHANGING, *OWN_SETTINGS, HELD)
    }


def matches(
    groups: Sequence[Group], saved: Saved, held: Sequence[Sequence[str]] = ()
) -> list[Match | None]:
    """Return the match in `saved` of each group of this job, in order.

    Saved groups are searched by these identities, in this order:

    1. all settings that differ between saved groups;
    2. the same settings without the mark of experts;
    3. the settings by which Megatron builds groups, because a restart may change rates. Among
       several candidates the parameters that they hold decide.

    A match is None if there is no candidate, or several that differ.

    Args:
        groups: the groups of this job.
        held: global keys of the parameters that each of these groups holds on this rank.
    """
    known = [(entry, group) for entry in saved for group in entry["param_groups"]]
    differing_names = differing([group for _, group in known])

    def exact(group: Group) -> Identity:
        settings = constants(group)
        return (*_basics(group), *(settings.get(name) for name in differing_names))

    def exact_but_expert(group: Group) -> Identity:
        settings = constants(group)
        others = (settings.get(name) for name in differing_names if name != EXPERT)
        return (*_basics(group)[1:], *others)

    result: list[Match | None] = [None] * len(groups)
    for identity in (exact, exact_but_expert):
        for number, group in enumerate(groups):
            result[number] = result[number] or _in_order(group, identity, groups, known)
    unmatched = [group for group, match in zip(groups, result, strict=True) if match is None]
    taken = {id(match[1]) for match in result if match is not None}
    free = [candidate for candidate in known if id(candidate[1]) not in taken]
    for number, group in enumerate(groups):
        for identity in (_basics, lambda group: _basics(group)[1:]):
            if result[number] is None:
                candidates = _candidates(group, identity, known)
                keys = set(held[number]) if held else set()
                rivals = [other for other in unmatched if identity(other) == identity(group)]
                if _are_alike([saved_group for _, saved_group in candidates]):
                    pass
                elif holders := [c for c in candidates if not keys.isdisjoint(c[1].get(HELD, ()))]:
                    candidates = holders
                elif _are_alike(rivals):
                    # A saved group that matches another group exactly is excluded.
                    candidates = _candidates(group, identity, free)
                is_clear = _are_alike([saved_group for _, saved_group in candidates])
                result[number] = candidates[0] if is_clear else None
    return result


def differing(groups: Sequence[Group]) -> list[str]:
    """Return the names of the settings that differ between groups."""
    settings = [constants(group) for group in groups]
    names = sorted({name for of_group in settings for name in of_group})
    return [name for name in names if len({of_group.get(name) for of_group in settings}) > 1]


def described(group: Group, differing_names: Sequence[str]) -> str:
    """Return a description of a group for a message.

    Args:
        differing_names: names of the settings that differ between groups.
    """
    settings = constants(group)
    names = dict.fromkeys([*IDENTIFIERS, *differing_names])
    return "(" + ", ".join(f"{name} {settings.get(name)}" for name in names) + ")"


def _basics(group: Group) -> Identity:
    """Return the settings by which every release builds groups, without rates; experts first."""
    # The mark of embeddings is `is_decoupled_lr` up to core 0.15, and `default_config` since.
    scheduled_apart = value_of(group, "is_decoupled_lr") or group.get("default_config") is False
    return (
        bool(value_of(group, EXPERT)),
        value_of(group, "wd_mult"),
        value_of(group, "lr_mult"),
        bool(scheduled_apart),
    )


def _candidates(
    group: Group, identity: Callable[[Group], Identity], known: list[Match]
) -> list[Match]:
    """Return the saved groups of the same identity.

    Groups of different optimizers may share an identity. The names of their settings distinguish
    Muon's groups from Adam's.
    """
    candidates = [saved for saved in known if identity(saved[1]) == identity(group)]
    same_kind = [c for c in candidates if setting_names(c[1]) == setting_names(group)]
    return same_kind or candidates


def _in_order(
    group: Group,
    identity: Callable[[Group], Identity],
    groups: Sequence[Group],
    known: list[Match],
) -> Match | None:
    """Return the match of `group`; of several candidates the one at the same position."""
    candidates = _candidates(group, identity, known)
    if _are_alike([saved_group for _, saved_group in candidates]):
        return candidates[0]
    peers = [peer for peer in groups if identity(peer) == identity(group)]
    if len(peers) != len(candidates):
        return None
    return candidates[next(number for number, peer in enumerate(peers) if peer is group)]


def _are_alike(groups: list[Group]) -> bool:
    """Return whether `groups` is not empty and all settings except step and experts are equal."""
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
    """Return Megatron's name of a setting, which NeMo may have renamed."""
    return key.removeprefix("pre_")


def _hashable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        numbers = value.reshape(-1).tolist()
        return numbers[0] if len(numbers) == 1 else tuple(numbers)
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    return value
