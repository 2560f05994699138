"""Param groups with equal marks of Megatron, under merges and other layouts.

The tests use plain data like param groups of core 0.17; tests/integration/test_reshard.py has
complete jobs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flashckpt.errors import MissingStateError
from megatron_flashckpt.megatron_lm.hyper_parameters import (
    check,
    completed,
    hyper_parameters,
    load_hyper_parameters,
    merge,
    without_held,
)
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.param_groups import HELD
from tests.megatron_lm.test_hyper_parameters import adam, chained, rates, stepped, wrapped

Group = dict[str, Any]
NEW = ("max_lr", "min_lr", "eps", "lr")


def group(**settings: Any) -> Group:
    """Return a group as core 0.17 creates it; own rates set `default_config` to False."""
    return {
        "params": [torch.nn.Parameter(torch.ones(3))],
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "max_lr": 0.002,
        "min_lr": 0.0,
        "eps": 1e-8,
        "lr": 0.0,
        "default_config": not {"max_lr", "min_lr"} & settings.keys(),
        **settings,
    }


def decoupled_and_mup(lr: float = 0.002, decoupled: float = 0.005) -> list[Group]:
    """Return the groups of vectors, embedding, output, and matrices of hidden layers."""
    scaled = {"eps": 2.5e-9}
    return [
        group(wd_mult=0.0, max_lr=lr) | {"default_config": True},
        group(max_lr=decoupled),
        group(max_lr=decoupled, **scaled),
        group(max_lr=lr / 4, **scaled),
    ]


def empty(groups: list[Group]) -> list[Group]:
    return [{**param_group, "params": []} for param_group in groups]


def scheduled(groups: list[Group]) -> list[Group]:
    """Give each group the learning rate of its own schedule."""
    return [{**param_group, "lr": param_group["max_lr"] / 2} for param_group in groups]


def saved_by(*groups: Group) -> list[dict[str, Any]]:
    return hyper_parameters(wrapped(stepped(adam(list(groups)))))


KEYS = ("norm", "embedding", "output", "fc1")


def geometry_of(inner: torch.optim.Optimizer, keys: tuple[str, ...]) -> ModelGeometry:
    """Return the geometry of a model whose parameters have these global keys, one per group."""
    held = [parameter for param_group in inner.param_groups for parameter in param_group["params"]]
    places = [SimpleNamespace(runs=(SimpleNamespace(key=key),)) for key in keys]
    return ModelGeometry((), list(zip(held, places, strict=True)), [], [])


def named(groups: list[Group], *keys: str) -> list[dict[str, Any]]:
    """Return the saved hyper-parameters of groups whose parameters have these keys."""
    inner = stepped(adam(groups))
    return hyper_parameters(wrapped(inner), geometry_of(inner, keys))


@pytest.mark.parametrize("are_new", [False, True])
@pytest.mark.parametrize("turn", range(4))
def test_groups_that_differ_only_in_rates_are_matched_in_any_order(
    turn: int, are_new: bool
) -> None:
    """If the job has new rates, the parameters of the groups identify them."""
    groups = scheduled(decoupled_and_mup())
    merged = merge(
        [
            # Each stage holds parameters of some groups.
            named([*groups[:2], *empty(groups[2:])], *KEYS[:2]),
            named([*empty(groups[:2]), *groups[2:]], *KEYS[2:]),
        ]
    )
    assert sum(len(entry["param_groups"]) for entry in merged) == 4
    fresh = decoupled_and_mup(0.004, 0.003) if are_new else decoupled_and_mup()
    inner = adam(fresh[turn:] + fresh[:turn])
    geometry = geometry_of(inner, KEYS[turn:] + KEYS[:turn]) if are_new else None
    check(wrapped(inner), merged, geometry)
    lines = load_hyper_parameters(wrapped(inner), merged, geometry)
    assert len(lines) == (4 if are_new else 0)
    settings = [{name: param_group[name] for name in NEW} for param_group in inner.param_groups]
    expected = [
        {name: param_group[name] for name in NEW} for param_group in groups[turn:] + groups[:turn]
    ]
    assert settings == expected
    assert all(HELD not in param_group for param_group in inner.param_groups)


def test_expert_groups_match_dense_groups_of_the_same_rates() -> None:
    def of_experts(groups: list[Group]) -> list[Group]:
        return [{**param_group, "is_expert_parallel": True} for param_group in groups]

    groups = scheduled(decoupled_and_mup())
    both = chained(*(wrapped(stepped(adam(own))) for own in (groups, of_experts(groups))))
    inner = adam(decoupled_and_mup())
    load_hyper_parameters(wrapped(inner), merge([hyper_parameters(both)]))
    experts = adam(of_experts(decoupled_and_mup()))
    load_hyper_parameters(
        chained(wrapped(adam(decoupled_and_mup())), wrapped(experts)), merge([saved_by(*groups)])
    )
    assert rates(inner) == rates(experts) == [param_group["lr"] for param_group in groups]


def older(**settings: Any) -> Group:
    """Return a group of core 0.15, where `is_decoupled_lr` had the role of `default_config`."""
    made = group(**settings)
    del made["default_config"]
    return made


def test_some_new_rates_are_accepted_and_logged() -> None:
    fresh = decoupled_and_mup()
    fresh[3]["max_lr"] = 0.25
    cases = [
        # One group has a new rate.
        (decoupled_and_mup(), fresh, [0, 1, 2, 3]),
        # With `--decoupled-lr` but not `--use-mup`, one group has `default_config` False.
        (
            [*decoupled_and_mup()[:2], group()],
            [*decoupled_and_mup(0.004, 0.003)[:2], group(max_lr=0.004, default_config=True)],
            [0, 1, 2],
        ),
        (
            [older(), older(wd_mult=0.0), older(max_lr=0.005, is_decoupled_lr=True)],
            [group(max_lr=0.005), group(), group(wd_mult=0.0)],
            [2, 0, 1],
        ),
    ]
    logged = []
    for saved, wanted, order in cases:
        groups = scheduled(saved)
        inner = adam(wanted)
        check(wrapped(inner), saved_by(*groups))
        logged.append(load_hyper_parameters(wrapped(inner), merge([saved_by(*groups)])))
        assert rates(inner) == [groups[number]["lr"] for number in order]
    assert "takes max_lr 0.0005 instead of 0.25" in logged[0][0]
    assert list(map(len, logged)) == [1, 3, 0]


def test_groups_with_equal_settings_are_matched_by_order() -> None:
    """A job's own schedule may give different learning rates to groups with equal settings."""
    groups = [group(lr=0.5), group(lr=0.25), group(wd_mult=0.0)]
    merged = merge([saved_by(*groups), saved_by(*groups)])
    assert sum(len(entry["param_groups"]) for entry in merged) == 3
    inner = adam([group(wd_mult=0.0), group(), group()])
    load_hyper_parameters(wrapped(inner), merged)
    assert rates(inner) == [0.0, 0.5, 0.25]
    for number in (1, 3):  # then no position tells which group is meant
        with pytest.raises(MissingStateError):
            check(wrapped(adam([group() for _ in range(number)])), merged)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (None, r"eps 2\.5e-09, max_lr 0\.003.*; it has .*max_lr 0\.0005"),
        (("norm", "embedding", "fc1", "fc1"), r"eps 2\.5e-09"),
    ],
    ids=["only rates", "a parameter of two groups"],
)
def test_new_rates_are_refused_if_nothing_else_identifies_groups(
    keys: tuple[str, ...] | None, message: str
) -> None:
    groups, inner = scheduled(decoupled_and_mup()), adam(decoupled_and_mup(0.004, 0.003))
    saved = saved_by(*groups) if keys is None else named(groups, *keys)
    with pytest.raises(MissingStateError, match=message):
        check(wrapped(inner), saved, None if keys is None else geometry_of(inner, KEYS))


def test_a_new_group_is_refused_instead_of_matched_to_another() -> None:
    saved = saved_by(*scheduled([group(), group(wd_mult=0.0)]))
    inner = adam([group(), group(wd_mult=0.0), group(max_lr=0.005)])
    with pytest.raises(MissingStateError, match="certainly meant"):
        check(wrapped(inner), saved)


def test_a_rank_learns_the_parameters_of_groups_on_other_ranks() -> None:
    groups = scheduled(decoupled_and_mup())
    own = named([*groups[:2], *empty(groups[2:])], *KEYS[:2])
    others = merge([own, named([*empty(groups[:2]), *groups[2:]], *KEYS[2:])])
    (entry,) = completed(own, others)
    assert [param_group[HELD] for param_group in entry["param_groups"]] == [[key] for key in KEYS]


def test_only_our_format_stores_the_parameters_of_groups() -> None:
    groups = scheduled(decoupled_and_mup())
    assert without_held(named(groups, *KEYS)) == saved_by(*groups)
