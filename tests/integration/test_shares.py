"""Shares of replicas in a save: several saves and loads in one job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.support.megatron_jobs import Result, assemble, run_cases

RANKS = 4


POLICIES = {
    "share": {},
    "first": {"replicated": {"weight": "first", "optimizer": "first"}},
    "mixed": {"replicated": {"weight": "first", "optimizer": "share"}},
    "two": {"replicated": {"weight": 2, "optimizer": 2}},
    "one and three": {"replicated": {"weight": 1, "optimizer": 3}},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Save the same plainly optimised model on 4 replicas of 2 nodes several times; load each save.

    Ranks learn in the first load which node each rank is on.
    """
    tmp_path = tmp_path_factory.mktemp("shares")
    save = [
        {
            "name": name,
            "call": "save",
            "iteration": 2,
            "args": {"save": str(tmp_path / name)},
            "config": config,
        }
        for name, config in POLICIES.items()
    ]
    load = [
        {
            "name": f"load {name}",
            "call": "load",
            "args": {"load": str(tmp_path / name), "save": str(tmp_path / "none")},
            "config": POLICIES["two"],
            "spoiled": True,
        }
        for name in POLICIES
    ]
    cases = [save[0], load[0], *save[1:], *load[1:]]
    (tmp_path / "job").mkdir()
    arguments = ["--num-layers", "2", "--bf16", "--train-iters", "2"]
    result = run_cases(tmp_path / "job", "policies", arguments, cases, ranks=RANKS, nodes=2)
    for event in result.events:
        assert event["error"] is None, event
    return tmp_path, result


@pytest.fixture(scope="module")
def where(saved: tuple[Path, Result]) -> Path:
    return saved[0]


def written(save: Path) -> list[dict[str, int]]:
    """Return the bytes per kind of state that every rank has written."""
    per_rank = []
    for file in sorted((save / "iter_0000002").glob("*.safetensors")):
        kinds: dict[str, int] = {}
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                kind = name.split("/")[0]
                tensor = shard.get_tensor(name)
                kinds[kind] = kinds.get(kind, 0) + tensor.numel() * tensor.element_size()
        per_rank.append(kinds)
    assert len(per_rank) == RANKS
    return per_rank


def state_bytes(kinds: dict[str, int]) -> int:
    return sum(nbytes for kind, nbytes in kinds.items() if kind != "rank_state")


def test_replicas_write_equal_byte_shares(where: Path) -> None:
    shares = [state_bytes(kinds) for kinds in written(where / "share")]
    # Shares end at elements of at most four bytes, in two streams (optimizer and weights).
    assert max(shares) - min(shares) <= 8
    assert min(shares) > 0


def test_the_first_replica_writes_everything_if_configured(where: Path) -> None:
    first, *others = written(where / "first")
    assert state_bytes(first) > 0
    assert [state_bytes(kinds) for kinds in others] == [0, 0, 0]
    weights = [kinds.get("weight", 0) for kinds in written(where / "mixed")]
    masters = [kinds.get("master", 0) for kinds in written(where / "mixed")]
    assert weights[0] > 0
    assert weights[1:] == [0, 0, 0]
    assert sum(masters) == 2 * sum(weights)
    assert max(masters) < sum(masters)


def test_the_configured_number_of_replicas_writes_on_different_nodes(where: Path) -> None:
    """Ranks 0 and 1 are on one node, 2 and 3 on the other."""
    shares = [state_bytes(kinds) for kinds in written(where / "two")]
    assert shares[1] == shares[3] == 0
    assert abs(shares[0] - shares[2]) <= 8
    assert shares[0] > 0
    kinds = written(where / "one and three")
    assert [rank for rank in range(RANKS) if kinds[rank].get("weight")] == [0]
    assert [rank for rank in range(RANKS) if kinds[rank].get("master")] == [0, 1, 2]


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


def test_shares_make_up_equal_tensors_for_every_choice_of_writers(where: Path) -> None:
    one, *others = (assemble(where / name, 2) for name in POLICIES)
    assert {kind for kind, _ in one} == {"weight", "master"}
    for other in others:
        assert other.keys() == one.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
