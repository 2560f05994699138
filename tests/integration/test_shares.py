"""Shares of replicas in a save: several saves and loads in one job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.megatron_jobs import Result, assemble, run_cases, tensors

RANKS = 4


POLICIES = {
    "share": {},
    "mixed": {"replicated": {"weight": "first", "optimizer": "share"}},
    "two": {"replicated": {"weight": 2, "optimizer": 2}},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Save the same plainly optimised model on 4 replicas of 2 nodes several times; load each save.

    Ranks learn in the first load which node each rank is on.
    """
    where = tmp_path_factory.mktemp("shares")
    save = [
        {"name": name, "call": "save", "iteration": 2, "args": {"save": str(where / name)}}
        | {"config": config}
        for name, config in POLICIES.items()
    ]
    load = [
        {"name": f"load {name}", "call": "load", "config": POLICIES["two"], "spoiled": True}
        | {"args": {"load": str(where / name), "save": str(where / "none")}}
        for name in POLICIES
    ]
    cases = [save[0], load[0], *save[1:], *load[1:]]
    (where / "job").mkdir()
    arguments = ["--num-layers", "2", "--bf16", "--train-iters", "2"]
    result = run_cases(where / "job", "policies", arguments, cases, ranks=RANKS, nodes=2)
    for event in result.events:
        assert event["error"] is None, event
    return where, result


def written(save: Path, *kinds: str) -> list[int]:
    """Return the bytes of these kinds of state that every rank has written."""
    nbytes = [0] * RANKS
    for (rank, name), tensor in tensors(save, 2).items():
        if name.partition("/")[0] in kinds:
            nbytes[rank] += tensor.nbytes
    return nbytes


def test_replicas_write_equal_shares(saved: tuple[Path, Result]) -> None:
    """Two configured replicas are on different nodes: ranks 0 and 1 share a node."""
    # Shares end at elements of at most four bytes, in two streams (optimizer and weights).
    share = written(saved[0] / "share", "weight", "master")
    assert 0 < max(share) <= min(share) + 8
    two = written(saved[0] / "two", "weight", "master")
    assert two[1] == two[3] == 0
    assert 0 < max(two) <= min(two[0], two[2]) + 8


def test_each_kind_of_state_has_a_policy_of_its_own(saved: tuple[Path, Result]) -> None:
    weights, masters = (written(saved[0] / "mixed", kind) for kind in ("weight", "master"))
    assert weights[0] > 0
    assert weights[1:] == [0, 0, 0]
    assert sum(masters) == 2 * sum(weights)
    assert max(masters) < sum(masters)


def test_a_load_is_equal_for_every_choice_of_writers(saved: tuple[Path, Result]) -> None:
    for rank in range(RANKS):
        loads = [
            event
            for event in saved[1].events
            if event["rank"] == rank and event["event"].startswith("load ")
        ]
        assert len(loads) == len(POLICIES)
        assert all(event["weights_changed"] for event in loads)
        assert len({event["state"] for event in loads}) == 1
    one, *others = (assemble(saved[0] / name, 2) for name in POLICIES)
    assert {kind for kind, _ in one} == {"weight", "master"}
    for other in others:
        assert other.keys() == one.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
