"""Nodes with one agent each: one agent commits for all, memory is exchanged, a lost node returns.

All "nodes" are on this machine: their agents have separate sockets.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.megatron_jobs import Result, differing, run_job, succeeded, tensors
from tests.support.trainer import agents_under, eventually, kill_agent

# Under a plain optimizer every replica holds only its share in memory, so half of the state that a
# rank needs lies on the other node.
MODEL = ["--num-layers", "2", "--bf16"]


def job(where: Path, name: str, run: str = "", *, ranks: int = 2, **kwargs: object) -> Result:
    """Train with the save directory `name`; `run` names one of several runs that share it."""
    save = str(where / name)
    arguments = ["--train-iters", "6", "--save", save, "--load", save, "--save-interval", "3"]
    batch = ["--global-batch-size", str(4 * ranks)]
    return run_job(where, run or name, [*MODEL, *arguments, *batch], ranks=ranks, **kwargs)


def test_a_restart_restores_from_the_memory_of_both_nodes(tmp_path: Path) -> None:
    whole = succeeded(job(tmp_path, "one"))
    killed = succeeded(job(tmp_path, "two", nodes=2, max_restarts=1, env={"KILL": "1:5"}))
    assert "iteration 3 was restored from memory" in killed.log
    expected = whole.losses()
    assert killed.losses(1) == {iteration: expected[iteration] for iteration in (4, 5, 6)}
    assert differing(tensors(tmp_path / "one", 6), tensors(tmp_path / "two", 6)) == []
    assert "successfully saved checkpoint from iteration       6" in killed.log
    assert_nothing_is_left(tmp_path, 2)


def test_a_lost_node_gets_its_ranks_memory_back_from_the_others(tmp_path: Path) -> None:
    """A node dies with its agent and all its memory, and all ranks move to another node.

    The test spoils the files in storage. `test_more_ranks.py` has ranks that receive copies.
    """
    nodes = 3
    whole = succeeded(job(tmp_path, "one", ranks=nodes))
    env = {
        "FLASHCKPT_REDUNDANCY": "xor",
        "FLASHCKPT_REDUNDANCY_GROUP": str(nodes),
        "FLASHCKPT_AGENT__ADDRESS": "127.0.0.1",
        "FLASHCKPT_AGENT__GRACE_S": "200",  # a slow machine takes long to start the node again
    }
    # Six reports that another agent holds a part: then all ranks are redundant.
    once = f"{tmp_path}/run/*/agent-*.log:iteration 3 is held by:6"
    dying = {**env, "KILL": "1:5", "KILL_ONCE": once}
    killed = job(tmp_path, "lost", ranks=nodes, nodes=nodes, env=dying)
    assert killed.returncode != 0
    assert [save["calls"] for save in killed.named("save")] == [[]] * nodes, "a save communicates"
    (agent,) = agents_under(tmp_path / "run/0")
    kill_agent(agent)
    shutil.rmtree(tmp_path / "run/0")
    shards = list((tmp_path / "lost/iter_0000003").glob("*.safetensors"))
    assert len(shards) == nodes
    for shard in shards:
        shard.write_bytes(b"")
    again = {"ranks": nodes, "nodes": nodes, "order": (1, 2, 0), "env": env}
    replaced = succeeded(job(tmp_path, "lost", "replaced", **again))
    assert "iteration 3 was restored from memory" in replaced.log
    assert "restored from memory: rank 0 copied " in replaced.log
    expected = whole.losses()
    assert replaced.losses() == {iteration: expected[iteration] for iteration in (4, 5, 6)}
    assert differing(tensors(tmp_path / "one", 6), tensors(tmp_path / "lost", 6)) == []
    assert_nothing_is_left(tmp_path, nodes)


def assert_nothing_is_left(where: Path, nodes: int) -> None:
    assert sorted(path.name for path in (where / "run").glob("?")) == [*map(str, range(nodes))]
    eventually("the end of the agents", lambda: not [*(where / "run").glob("?/*")])
