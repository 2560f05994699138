"""Groups that share Megatron's marks keep their settings through merges and other layouts.

Plain data in the form of core 0.17's param groups; tests/integration/test_reshard.py has whole
jobs.
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
    """Return a group as core 0.17 makes it; rates of its own unmark `default_config`."""
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
    """Return the groups of vectors, embedding, output and hidden layers' matrices."""
    scaled = {"eps": 2.5e-9}
    return [
        group(wd_mult=0.0, max_lr=lr) | {"default_config": True},
        group(max_lr=decoupled),
        group(max_lr=decoupled, **scaled),
        group(max_lr=lr / 4, **scaled),
    ]


def empty(groups: list[Group]) -> list[Group]:
    return [{**it, "params": []} for it in groups]


def scheduled(groups: list[Group]) -> list[Group]:
    """Give each group the learning rate of its own schedule."""
    return [{**it, "lr": it["max_lr"] / 2} for it in groups]


def saved_by(*groups: Group) -> list[dict[str, Any]]:
    return hyper_parameters(wrapped(stepped(adam(list(groups)))))


@pytest.mark.parametrize("turn", range(4))
def test_groups_that_differ_in_rates_alone_stay_apart_over_ranks_and_in_any_order(
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
    found = [{name: it[name] for name in NEW} for it in inner.param_groups]
    expected = [{name: it[name] for name in NEW} for it in groups[turn:] + groups[:turn]]
    assert found == expected


def test_experts_of_every_group_go_into_the_dense_group_of_the_same_rates() -> None:
    groups = scheduled(decoupled_and_mup())
    experts = [{**copy.deepcopy(it), "is_expert_parallel": True} for it in groups]
    saved = hyper_parameters(
        chained(wrapped(stepped(adam(groups))), wrapped(stepped(adam(experts))))
    )
    inner = adam(decoupled_and_mup())
    load_hyper_parameters(wrapped(inner), merge([saved]))
    assert rates(inner) == [it["lr"] for it in groups]
    there = adam([{**it, "is_expert_parallel": True} for it in decoupled_and_mup()])
    load_hyper_parameters(
        chained(wrapped(adam(decoupled_and_mup())), wrapped(there)),
        merge([saved_by(*groups)]),
    )
    assert rates(there) == [it["lr"] for it in groups]


def test_the_one_group_whose_rate_a_restart_changed_is_the_one_left_over_and_that_is_told() -> None:
    groups = scheduled(decoupled_and_mup())
    fresh = decoupled_and_mup()
    fresh[3]["max_lr"] = 0.25
    inner = adam(fresh)
    check(wrapped(inner), saved_by(*groups))
    (line,) = load_hyper_parameters(wrapped(inner), saved_by(*groups))
    assert "takes max_lr 0.0005 instead of 0.25" in line
    assert rates(inner) == [it["lr"] for it in groups]


def test_new_rates_of_all_groups_are_refused_where_they_alone_told_groups_apart() -> None:
    saved = saved_by(*scheduled(decoupled_and_mup()))
    inner = adam(decoupled_and_mup(0.004, 0.003))
    before = copy.deepcopy([{**it, "params": None} for it in inner.param_groups])
    with pytest.raises(MissingStateError) as caught:
        check(wrapped(inner), saved)
    wanted, known = str(caught.value).split("; it has ")
    assert "max_lr 0.003)" in wanted
    assert "eps 2.5e-09" in wanted
    assert "max_lr 0.0005" in known
    assert "--no-load-optim" in known
    assert [{**it, "params": None} for it in inner.param_groups] == before


def test_new_rates_are_no_matter_where_other_marks_tell_groups_apart() -> None:
    """`--decoupled-lr` without `--use-mup`: `default_config` is False for it alone."""
    groups = scheduled([*decoupled_and_mup()[:2], group()])
    inner = adam([*decoupled_and_mup(0.004, 0.003)[:2], group(max_lr=0.004, default_config=True)])
    check(wrapped(inner), saved_by(*groups))
    assert len(load_hyper_parameters(wrapped(inner), saved_by(*groups))) == 3
    assert rates(inner) == [it["lr"] for it in groups]


def test_a_group_that_is_new_is_refused_and_not_given_the_rates_of_another() -> None:
    saved = saved_by(*scheduled([group(), group(wd_mult=0.0)]))
    inner = adam([group(), group(wd_mult=0.0), group(max_lr=0.005)])
    with pytest.raises(MissingStateError, match="certainly meant"):
        check(wrapped(inner), saved)
    (*_, lost) = matches(inner.param_groups, saved)
    assert lost is None


def test_the_mark_of_older_releases_is_known() -> None:
    """Up to core 0.15 `is_decoupled_lr` said what `default_config` says since."""
    older = [group(), group(wd_mult=0.0), group(max_lr=0.005, is_decoupled_lr=True)]
    for it in older:
        del it["default_config"]
    groups = scheduled(older)
    inner = adam([group(max_lr=0.005), group(), group(wd_mult=0.0)])
    load_hyper_parameters(wrapped(inner), merge([saved_by(*groups)]))
    assert rates(inner) == [0.0025, 0.001, 0.001]


def test_order_tells_apart_what_differs_in_no_setting() -> None:
    """As where a job's own schedule gives groups, made alike, other learning rates."""
    groups = [group(lr=0.5), group(lr=0.25), group(wd_mult=0.0)]
    merged = merge([saved_by(*groups), saved_by(*groups)])
    assert sum(len(entry["param_groups"]) for entry in merged) == 3
    inner = adam([group(wd_mult=0.0), group(), group()])
    load_hyper_parameters(wrapped(inner), merged)
    assert rates(inner) == [0.0, 0.5, 0.25]
    with pytest.raises(MissingStateError):
        check(wrapped(adam([group(), group(), group()])), merged)


# ---------------------------------------------------------------------- by their parameters

KEYS = ("norm", "embedding", "output", "fc1")


def geometry_of(inner: torch.optim.Optimizer, keys: tuple[str, ...]) -> ModelGeometry:
    """Return the geometry of a model whose parameters have these global keys, one per group."""
    held = [parameter for each in inner.param_groups for parameter in each["params"]]
    places = [SimpleNamespace(runs=(SimpleNamespace(key=key),)) for key in keys]
    return ModelGeometry((), list(zip(held, places, strict=True)), [], [])


def named(groups: list[Group], *keys: str) -> list[dict[str, Any]]:
    """Return what is saved of groups that hold parameters of these keys."""
    inner = stepped(adam(groups))
    return hyper_parameters(wrapped(inner), geometry_of(inner, keys))


@pytest.mark.parametrize("turn", range(4))
def test_new_rates_of_all_groups_go_by_the_parameters_that_groups_held(turn: int) -> None:
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
    told = load_hyper_parameters(wrapped(inner), merged, geometry)
    assert len(told) == 4
    assert rates(inner) == [it["lr"] for it in groups[turn:] + groups[:turn]]
    assert all(HELD not in it for it in inner.param_groups)


def test_a_rank_in_its_own_place_knows_what_groups_hold_on_others() -> None:
    groups = scheduled(decoupled_and_mup())
    own = named([*groups[:2], *empty(groups[2:])], *KEYS[:2])
    others = merge([own, named([*empty(groups[:2]), *groups[2:]], *KEYS[2:])])
    (entry,) = completed(own, others)
    assert [it[HELD] for it in entry["param_groups"]] == [[key] for key in KEYS]


def test_a_parameter_that_two_groups_held_decides_nothing() -> None:
    saved = named(scheduled(decoupled_and_mup()), "norm", "embedding", "fc1", "fc1")
    inner = adam(decoupled_and_mup(0.004, 0.003))
    with pytest.raises(MissingStateError, match=r"eps 2\.5e-09"):
        check(wrapped(inner), saved, geometry_of(inner, KEYS))


def test_names_of_parameters_are_of_our_own_format_only() -> None:
    groups = scheduled(decoupled_and_mup())
    assert without_held(named(groups, *KEYS)) == saved_by(*groups)
