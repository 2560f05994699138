"""Nodes with one agent each: one agent commits for all, memory is exchanged, a lost node returns.

All "nodes" are on this machine: their agents have separate sockets.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.megatron_jobs import Result, differing, run_job, succeeded, tensors
from tests.support.trainer import agents_under, eventually, is_alive

# Under a plain optimizer every replica holds only its share in memory, so half of the state that a
# rank needs lies on the other node.
MODEL = ["--num-layers", "2", "--bf16"]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_nodes")


def job(where: Path, name: str, run: str = "", *, ranks: int = 2, **kwargs: object) -> Result:
    """Train with the save directory `name`; `run` names one of several runs that share it."""
    save = str(where / name)
    arguments = ["--train-iters", "6", "--save", save, "--load", save, "--save-interval", "3"]
    batch = ["--global-batch-size", str(4 * ranks)]
    return run_job(where, run or name, [*MODEL, *arguments, *batch], ranks=ranks, **kwargs)


def last_losses(result: Result, iteration: int, ranks: int = 2) -> list[list[str]]:
    """Return the losses of each rank's last pass through `iteration`, two micro-batches each.

    Attempts are not comparable: torchrun counts a restart only on the node where a rank died.
    """
    of_ranks = [
        [e["value"] for e in result.named("loss") if (e["rank"], e["iteration"]) == (r, iteration)]
        for r in range(ranks)
    ]
    assert all(len(losses) >= 2 for losses in of_ranks)
    return [losses[-2:] for losses in of_ranks]


@pytest.fixture(scope="module")
def whole(where: Path) -> Result:
    return succeeded(job(where, "one"))


def test_a_restart_restores_from_the_memory_of_both_nodes(where: Path, whole: Result) -> None:
    killed = succeeded(
        job(where, "two", nodes=2, max_restarts=1, env={"KILL": "1:5"}, torchrun=True)
    )
    assert "iteration 3 was restored from memory" in killed.log
    for iteration in (4, 5, 6):
        assert last_losses(killed, iteration) == last_losses(whole, iteration)
    assert differing(tensors(where / "one", 6), tensors(where / "two", 6)) == []
    assert "successfully saved checkpoint from iteration       6" in killed.log
    assert_nothing_is_left(where, 2)


@dataclasses.dataclass(frozen=True)
class RedundancyCase:
    """A redundancy scheme, and the number of reports after which all ranks are redundant."""

    redundancy: str
    nodes: int
    sent: int
    """Number of reports that another agent holds a slot."""
    node: int | None = 1
    """The node that is lost; None: no node is lost."""
    order: tuple[int, ...] | None = None
    """The node of each rank after the restart; None: unchanged."""


LOST = {
    "copy": RedundancyCase("copy", 2, sent=2),
    "copy, two nodes swapped": RedundancyCase("copy", 2, sent=2, node=None, order=(1, 0)),
    "xor, all ranks moved": RedundancyCase("xor", 3, sent=6, node=0, order=(1, 2, 0)),
}


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST.keys())
def test_a_lost_node_gets_its_ranks_memory_back_from_the_others(
    tmp_path: Path, whole: Result, where: Path, lost: RedundancyCase
) -> None:
    """The node dies with its agent and all its memory; the test spoils the files in storage."""
    nodes = lost.nodes
    reference = where
    if nodes != 2:
        whole, reference = succeeded(job(tmp_path, "one", ranks=nodes)), tmp_path
    env = {
        "FLASHCKPT_REDUNDANCY": lost.redundancy,
        "FLASHCKPT_REDUNDANCY_GROUP": str(nodes),
        "FLASHCKPT_AGENT__ADDRESS": "127.0.0.1",
        "FLASHCKPT_AGENT__GRACE_S": "200",  # a slow machine takes long to start the node again
    }
    once = f"{tmp_path}/run/*/agent-*.log:iteration 3 is held by:{lost.sent}"
    dying = {**env, "KILL": "1:5", "KILL_ONCE": once}
    killed = job(tmp_path, "lost", ranks=nodes, nodes=nodes, env=dying)
    assert killed.returncode != 0
    assert [save["calls"] for save in killed.named("save")] == [[]] * nodes, "a save communicates"
    if lost.node is not None:
        (agent,) = agents_under(tmp_path / f"run/{lost.node}")
        os.kill(agent, signal.SIGKILL)
        eventually("the end of the agent", lambda: not is_alive(agent))
        shutil.rmtree(tmp_path / f"run/{lost.node}")
    shards = list((tmp_path / "lost/iter_0000003").glob("*.safetensors"))
    assert len(shards) == nodes
    for shard in shards:
        shard.write_bytes(b"")
    again = {"ranks": nodes, "nodes": nodes, "order": lost.order, "env": env}
    replaced = succeeded(job(tmp_path, "lost", "replaced", **again))
    assert "iteration 3 was restored from memory" in replaced.log
    assert "restored from memory: rank 0 copied " in replaced.log
    for iteration in (4, 5, 6):
        restarted_losses = last_losses(replaced, iteration, nodes)
        assert restarted_losses == last_losses(whole, iteration, nodes)
    assert differing(tensors(reference / "one", 6), tensors(tmp_path / "lost", 6)) == []
    assert_nothing_is_left(tmp_path, nodes)


def assert_nothing_is_left(where: Path, nodes: int) -> None:
    assert sorted(path.name for path in (where / "run").glob("?")) == [*map(str, range(nodes))]
    eventually("the end of the agents", lambda: not [*(where / "run").glob("?/*")])
