"""Two nodes with an agent each: one commits for both, and memory is exchanged over the network.

Both "nodes" are this machine: two torchrun processes whose agents have sockets of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.jobs import Result, differing, run_job, succeeded, tensors

# A plain optimizer: every replica holds only its share in memory, so half of what a rank needs
# lies on the other node.
MODEL = ["--num-layers", "2", "--bf16"]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_nodes")


def job(where: Path, name: str, **kwargs: object) -> Result:
    save = str(where / name)
    arguments = ["--train-iters", "6", "--save", save, "--load", save, "--save-interval", "3"]
    return succeeded(run_job(where, name, [*MODEL, *arguments], ranks=2, **kwargs))


def last_losses(result: Result, iteration: int) -> list[list[str]]:
    """The losses of the last time that each rank trained `iteration`, two micro-batches each.

    Not by attempt: torchrun counts a restart only on the node where a rank died.
    """
    found = [
        [e["value"] for e in result.named("loss") if (e["rank"], e["iteration"]) == (r, iteration)]
        for r in range(2)
    ]
    assert all(len(losses) >= 2 for losses in found)
    return [losses[-2:] for losses in found]


def test_a_restart_restores_from_the_memory_of_both_nodes(where: Path) -> None:
    whole = job(where, "one")
    killed = job(where, "two", nodes=2, max_restarts=1, env={"KILL": "1:5"})
    assert "iteration 3 was restored from memory" in killed.log
    for iteration in (4, 5, 6):
        assert last_losses(killed, iteration) == last_losses(whole, iteration)
    assert differing(tensors(where / "one", 6), tensors(where / "two", 6)) == []
    assert "successfully saved checkpoint from iteration       6" in killed.log


def test_nothing_is_left_behind_on_either_node(where: Path) -> None:
    assert sorted(path.name for path in (where / "run").iterdir()) == ["0", "1"]
    assert [list(path.iterdir()) for path in (where / "run").glob("[01]")] == [[], []]
