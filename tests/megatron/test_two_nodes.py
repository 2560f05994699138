"""Two nodes with an agent each: one commits for both, memory is exchanged, a lost node comes back.

Both "nodes" are this machine: two torchrun processes whose agents have sockets of their own.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.agent.trainer import agents_under, eventually, is_alive
from tests.megatron.jobs import Result, differing, run_job, succeeded, tensors

# A plain optimizer: every replica holds only its share in memory, so half of what a rank needs
# lies on the other node.
MODEL = ["--num-layers", "2", "--bf16"]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_nodes")


def job(where: Path, name: str, run: str = "", **kwargs: object) -> Result:
    """Train with a save directory of that name; tell several runs with it apart by `run`."""
    save = str(where / name)
    arguments = ["--train-iters", "6", "--save", save, "--load", save, "--save-interval", "3"]
    return run_job(where, run or name, [*MODEL, *arguments], ranks=2, **kwargs)


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


@pytest.fixture(scope="module")
def whole(where: Path) -> Result:
    return succeeded(job(where, "one"))


def test_a_restart_restores_from_the_memory_of_both_nodes(where: Path, whole: Result) -> None:
    killed = succeeded(job(where, "two", nodes=2, max_restarts=1, env={"KILL": "1:5"}))
    assert "iteration 3 was restored from memory" in killed.log
    for iteration in (4, 5, 6):
        assert last_losses(killed, iteration) == last_losses(whole, iteration)
    assert differing(tensors(where / "one", 6), tensors(where / "two", 6)) == []
    assert "successfully saved checkpoint from iteration       6" in killed.log


def test_a_lost_node_gets_its_ranks_memory_back_from_the_other(where: Path, whole: Result) -> None:
    """One dies with its agent and all its memory; what lies in storage is made worthless."""
    copies = {
        "FLASHCKPT_REDUNDANCY": "copy",
        "FLASHCKPT_AGENT__ADDRESS": "127.0.0.1",
        "FLASHCKPT_AGENT__GRACE_S": "200",  # a slow machine takes long to come back
    }
    once = f"{where}/run/*/*/agent.log:iteration 3 is held by:2"
    killed = job(where, "lost", nodes=2, env={**copies, "KILL": "1:5", "KILL_ONCE": once})
    assert killed.returncode != 0
    assert [save["calls"] for save in killed.named("save")] == [[], []], "no save communicates"
    (agent,) = agents_under(where / "run/1")
    os.kill(agent, signal.SIGKILL)
    eventually("the end of the agent", lambda: not is_alive(agent))
    shutil.rmtree(where / "run/1")
    shards = list((where / "lost/iter_0000003").glob("*.safetensors"))
    assert len(shards) == 2
    for shard in shards:
        shard.write_bytes(b"")
    replaced = succeeded(job(where, "lost", "replaced", nodes=2, env=copies))
    assert "iteration 3 was restored from memory" in replaced.log
    assert "rank 0 read 0.0 MiB and received" in replaced.log
    for iteration in (4, 5, 6):
        assert last_losses(replaced, iteration) == last_losses(whole, iteration)
    assert differing(tensors(where / "one", 6), tensors(where / "lost", 6)) == []


def test_nothing_is_left_behind_on_either_node(where: Path) -> None:
    assert sorted(path.name for path in (where / "run").iterdir()) == ["0", "1"]
    assert [list(path.iterdir()) for path in (where / "run").glob("[01]")] == [[], []]
