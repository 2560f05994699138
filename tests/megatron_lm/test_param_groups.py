"""Param groups with equal marks of Megatron, under merges and other layouts.

The tests use plain data like param groups of core 0.17; tests/integration/test_reshard.py has
complete jobs.
"""

from __future__ import annotations

import copy
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
from megatron_flashckpt.megatron_lm.param_groups import HELD, matches
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


@pytest.mark.parametrize("turn", range(4))
def test_groups_that_differ_only_in_rates_stay_separate_in_any_order(
    turn: int,
) -> None:
    groups = scheduled(decoupled_and_mup())
    of_ranks = [
        # Each stage holds parameters of some groups.
        saved_by(*groups[:2], *empty(groups[2:])),
        saved_by(*empty(groups[:2]), *groups[2:]),
    ]
    merged = merge(of_ranks)
    assert sum(len(entry["param_groups"]) for entry in merged) == 4
    fresh = decoupled_and_mup()
    inner = adam(fresh[turn:] + fresh[:turn])
    check(wrapped(inner), merged)
    assert load_hyper_parameters(wrapped(inner), merged) == []
    settings = [{name: param_group[name] for name in NEW} for param_group in inner.param_groups]
    expected = [
        {name: param_group[name] for name in NEW} for param_group in groups[turn:] + groups[:turn]
    ]
    assert settings == expected


def test_expert_groups_match_dense_groups_of_the_same_rates() -> None:
    groups = scheduled(decoupled_and_mup())
    experts = [{**copy.deepcopy(param_group), "is_expert_parallel": True} for param_group in groups]
    saved = hyper_parameters(
        chained(wrapped(stepped(adam(groups))), wrapped(stepped(adam(experts))))
    )
    inner = adam(decoupled_and_mup())
    load_hyper_parameters(wrapped(inner), merge([saved]))
    assert rates(inner) == [param_group["lr"] for param_group in groups]
    there = adam(
        [{**param_group, "is_expert_parallel": True} for param_group in decoupled_and_mup()]
    )
    load_hyper_parameters(
        chained(wrapped(adam(decoupled_and_mup())), wrapped(there)),
        merge([saved_by(*groups)]),
    )
    assert rates(there) == [param_group["lr"] for param_group in groups]


def test_one_group_with_a_changed_rate_is_matched_and_logged() -> None:
    groups = scheduled(decoupled_and_mup())
    fresh = decoupled_and_mup()
    fresh[3]["max_lr"] = 0.25
    inner = adam(fresh)
    check(wrapped(inner), saved_by(*groups))
    (line,) = load_hyper_parameters(wrapped(inner), saved_by(*groups))
    assert "takes max_lr 0.0005 instead of 0.25" in line
    assert rates(inner) == [param_group["lr"] for param_group in groups]


def test_new_rates_are_refused_if_only_rates_identify_groups() -> None:
    saved = saved_by(*scheduled(decoupled_and_mup()))
    inner = adam(decoupled_and_mup(0.004, 0.003))
    before = copy.deepcopy([{**param_group, "params": None} for param_group in inner.param_groups])
    with pytest.raises(MissingStateError) as caught:
        check(wrapped(inner), saved)
    wanted, known = str(caught.value).split("; it has ")
    assert "max_lr 0.003)" in wanted
    assert "eps 2.5e-09" in wanted
    assert "max_lr 0.0005" in known
    assert "--no-load-optim" in known
    assert [{**param_group, "params": None} for param_group in inner.param_groups] == before


def test_new_rates_are_accepted_if_other_marks_identify_groups() -> None:
    """With `--decoupled-lr` but not `--use-mup`, one group has `default_config` False."""
    groups = scheduled([*decoupled_and_mup()[:2], group()])
    inner = adam([*decoupled_and_mup(0.004, 0.003)[:2], group(max_lr=0.004, default_config=True)])
    check(wrapped(inner), saved_by(*groups))
    assert len(load_hyper_parameters(wrapped(inner), saved_by(*groups))) == 3
    assert rates(inner) == [param_group["lr"] for param_group in groups]


def test_a_new_group_is_refused_instead_of_matched_to_another() -> None:
    saved = saved_by(*scheduled([group(), group(wd_mult=0.0)]))
    inner = adam([group(), group(wd_mult=0.0), group(max_lr=0.005)])
    with pytest.raises(MissingStateError, match="certainly meant"):
        check(wrapped(inner), saved)
    (*_, lost) = matches(inner.param_groups, saved)
    assert lost is None


def test_the_mark_of_older_releases_is_recognized() -> None:
    """Up to core 0.15 the mark `is_decoupled_lr` had the role of `default_config`."""
    older = [group(), group(wd_mult=0.0), group(max_lr=0.005, is_decoupled_lr=True)]
    for param_group in older:
        del param_group["default_config"]
    groups = scheduled(older)
    inner = adam([group(max_lr=0.005), group(), group(wd_mult=0.0)])
    load_hyper_parameters(wrapped(inner), merge([saved_by(*groups)]))
    assert rates(inner) == [0.0025, 0.001, 0.001]


def test_groups_with_equal_settings_are_matched_by_order() -> None:
    """A job's own schedule may give different learning rates to groups with equal settings."""
    groups = [group(lr=0.5), group(lr=0.25), group(wd_mult=0.0)]
    merged = merge([saved_by(*groups), saved_by(*groups)])
    assert sum(len(entry["param_groups"]) for entry in merged) == 3
    inner = adam([group(wd_mult=0.0), group(), group()])
    load_hyper_parameters(wrapped(inner), merged)
    assert rates(inner) == [0.0, 0.5, 0.25]
    with pytest.raises(MissingStateError):
        check(wrapped(adam([group(), group(), group()])), merged)


# ---------------------------------------------------------------------- matches by parameters

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


@pytest.mark.parametrize("turn", range(4))
def test_groups_with_new_rates_are_matched_by_their_parameters(turn: int) -> None:
    groups = scheduled(decoupled_and_mup())
    merged = merge(
        [
            named([*groups[:2], *empty(groups[2:])], *KEYS[:2]),
            named([*empty(groups[:2]), *groups[2:]], *KEYS[2:]),
        ]
    )
    fresh = decoupled_and_mup(0.004, 0.003)
    inner = adam(fresh[turn:] + fresh[:turn])
    geometry = geometry_of(inner, KEYS[turn:] + KEYS[:turn])
    check(wrapped(inner), merged, geometry)
    lines = load_hyper_parameters(wrapped(inner), merged, geometry)
    assert len(lines) == 4
    assert rates(inner) == [param_group["lr"] for param_group in groups[turn:] + groups[:turn]]
    assert all(HELD not in param_group for param_group in inner.param_groups)


def test_a_rank_learns_the_parameters_of_groups_on_other_ranks() -> None:
    groups = scheduled(decoupled_and_mup())
    own = named([*groups[:2], *empty(groups[2:])], *KEYS[:2])
    others = merge([own, named([*empty(groups[:2]), *groups[2:]], *KEYS[2:])])
    (entry,) = completed(own, others)
    assert [param_group[HELD] for param_group in entry["param_groups"]] == [[key] for key in KEYS]


def test_a_parameter_of_two_groups_identifies_neither() -> None:
    saved = named(scheduled(decoupled_and_mup()), "norm", "embedding", "fc1", "fc1")
    inner = adam(decoupled_and_mup(0.004, 0.003))
    with pytest.raises(MissingStateError, match=r"eps 2\.5e-09"):
        check(wrapped(inner), saved, geometry_of(inner, KEYS))


def test_only_our_format_stores_the_parameters_of_groups() -> None:
    groups = scheduled(decoupled_and_mup())
    assert without_held(named(groups, *KEYS)) == saved_by(*groups)
