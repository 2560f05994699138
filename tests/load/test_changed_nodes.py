"""Recovery of checkpoints in memory when every rank runs on another node after a restart.

Each scenario has three agents with one rank each. Iteration 5 is committed, later saves are
memory-only. Then the ranks start again as new processes and ask for the checkpoints in memory.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_flashckpt import collectives
from megatron_flashckpt.config import AgentConfig, Config
from megatron_flashckpt.load.memory_checkpoints import held_in_memory
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.save.peer_setup import connect_agents
from tests.support.cluster import Cluster
from tests.support.forked.nursery import call_in_ranks
from tests.support.trainer import content, new_save_id

RANKS = 3
Redundancy = Literal["none", "copy", "xor"]


@dataclasses.dataclass(frozen=True)
class Restart:
    """A restart: the nodes that are lost before it, and the node of each rank after it."""

    redundancy: Redundancy
    lost: tuple[int, ...]
    nodes: tuple[int, ...]
    holders: int = 1
    kept: tuple[int, ...] = (10,)
    """Iterations of memory-only saves after the commit of iteration 5."""
    is_first: bool = False
    """True if nothing was saved before."""


SAME, NEXT = (0, 1, 2), (1, 2, 0)
RESTARTS = {
    "same nodes": Restart("copy", (), SAME),
    "other nodes": Restart("copy", (), NEXT, kept=(10, 15)),
    "first lost, copy": Restart("copy", (0,), NEXT),
    "first lost, xor": Restart("xor", (0,), NEXT, holders=2),
    "two lost": Restart("copy", (0, 1), NEXT),
    "no redundancy": Restart("none", (), NEXT),
    "first start": Restart("copy", (), SAME, is_first=True),
}


def _save(made: Cluster, restart: Restart) -> None:
    """Commit iteration 5, make the memory-only saves, then lose nodes."""
    has_copies = restart.redundancy != "none"
    if has_copies:
        made.start(restart.redundancy, RANKS)
    else:
        made.restart_trainers()
    if restart.is_first:
        return
    made.stage(5)
    assert [trainer.outcome().error for trainer in made.trainers.values()] == [None] * RANKS
    if has_copies:
        made.await_held(5, restart.holders)
    for iteration in restart.kept:
        save_id = new_save_id()
        for trainer in made.trainers.values():
            assert trainer.keep(iteration, save_id).kept
        if has_copies:  # before the next one: an older save is not sent any more
            made.await_held(iteration, restart.holders)
    made.lose(*restart.lost)


def _ask(rank: int, where: Path, places: dict[str, tuple[str, Redundancy, list[str]]]) -> None:
    """Ask for the checkpoints in memory in each scenario, and write the answers to a file."""
    os.environ.update(MASTER_ADDR="localhost", LOCAL_RANK="0")
    for name, (root, redundancy, runtime_dirs) in places.items():
        dist.init_process_group(
            "gloo",
            init_method=f"file://{where / name}",
            rank=rank,
            world_size=RANKS,
            timeout=datetime.timedelta(seconds=60),
        )
        config = Config(
            runtime_dir=runtime_dirs[rank],
            redundancy=redundancy,
            agent=AgentConfig(grace_s=600.0, address="127.0.0.1"),
        )
        link = NodeLink(root, rank, config)
        calls = 0

        def counted(
            *args: Any, real: Callable[..., Any] = collectives._all_gathered
        ) -> list[memoryview]:
            nonlocal calls
            calls += 1
            return real(*args)

        if redundancy != "none":
            connect_agents(link, rank, config)
        checkpointer: Any = SimpleNamespace(
            link=link, config=config, rank=rank, start_run=lambda: None
        )
        with mock.patch.object(collectives, "_all_gathered", counted):
            checkpoints = held_in_memory(checkpointer).checkpoints
        entries = []
        for held in checkpoints:
            assert held.slab is not None
            slot = held.slab.slots[held.offer.slot]
            with slot.data() as data:
                is_right = data == content(rank, held.offer.iteration, len(data))
            entries.append((held.offer.iteration, is_right))
        (where / f"{name}-{rank}").write_text(json.dumps([calls, entries]))
        dist.barrier()
        link.close(leave=False)
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    """Return, by scenario and rank, the collective calls and the checkpoints found in memory.

    A checkpoint is a list `[iteration, is_right]`.
    """
    where = tmp_path_factory.mktemp("changed_nodes")
    made = {}
    try:
        for name, restart in RESTARTS.items():
            (where / "n" / name).mkdir(parents=True)
            made[name] = Cluster(where / "n" / name, where / "n" / name / "save", [1] * RANKS)
            for node in made[name].nodes:
                # Ranks reconnect only when all scenarios are prepared.
                node.config = functools.partial(node.config, grace_s=600.0)  # type: ignore[method-assign]
            _save(made[name], restart)
            for trainer in made[name].trainers.values():
                trainer.hang_up()
        places = {
            name: (
                str(made[name].root),
                restart.redundancy,
                [str(made[name].nodes[node].runtime_dir) for node in restart.nodes],
            )
            for name, restart in RESTARTS.items()
        }
        call_in_ranks(_ask, (where, places), RANKS)
        yield {
            name: [json.loads((where / f"{name}-{rank}").read_text()) for rank in range(RANKS)]
            for name in RESTARTS
        }
    finally:
        for job in made.values():
            job.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("same nodes", [10, 5]),
        ("other nodes", [15, 10]),
        ("first lost, copy", [10, 5]),
        ("first lost, xor", [10, 5]),
        # Some rank cannot get these.
        ("two lost", []),
        ("no redundancy", []),
        ("first start", []),
    ],
)
def test_ranks_on_any_nodes_recover_what_all_of_them_can_get(
    results: dict[str, list[Any]], name: str, expected: list[int]
) -> None:
    entries = [[iteration, True] for iteration in expected]
    assert [found for _, found in results[name]] == [entries] * RANKS
    if name in ("same nodes", "no redundancy", "first start"):
        assert [calls for calls, _ in results[name]] == [1] * RANKS, "they agree in one call"
