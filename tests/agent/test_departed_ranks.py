"""Memory of departed ranks, which a new run does not have on this node, is freed when unused."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.agent.run_messages import BeginRun, HeldSlab, describe_slabs
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.memory.host_memory import Limit
from megatron_flashckpt.save import node_memory
from megatron_flashckpt.save.new_slab import slab_nbytes
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.save.node_memory import Need
from tests.agent.conftest import Node
from tests.support.processes import MIB, memory_nbytes, open_files
from tests.support.stored import read_rank, stored
from tests.support.trainer import (
    FakeTrainer,
    blocked_shard,
    eventually,
    new_save_id,
    run_after,
    save_all,
)


def slabs(agent: int) -> list[int]:
    """Return the ranks whose slabs an agent has open."""
    paths = {path for path in open_files(agent) if "memfd:flashckpt-" in path}
    return sorted(int(path.partition("flashckpt-")[2].split(" ")[0]) for path in paths)


def started(node: Node, root: Path, ranks: Iterable[int], **more: int) -> list[FakeTrainer]:
    """Return the trainers of a run that has these ranks on this node."""
    ranks = list(ranks)
    return [node.trainer(root, rank, len(ranks), **more) for rank in ranks]


def begin(trainers: list[FakeTrainer]) -> None:
    """Let all trainers of a run on this node report that they have loaded."""
    ranks = tuple(trainer.rank for trainer in trainers)
    for trainer in trainers:
        trainer.client.begin_run(BeginRun("second", ranks))


def crash(trainers: list[FakeTrainer]) -> None:
    for trainer in trainers:
        trainer.hang_up()


def test_a_run_with_fewer_ranks_frees_the_memory_of_the_others(node: Node, root: Path) -> None:
    first = started(node, root, range(4), numel=2 * MIB)
    agent = first[0].client.agent_pid
    assert not any(save_all(first, 1))
    crash(first)
    before = memory_nbytes(agent, "RssShmem")
    assert before > 4 * 6 * 2 * MIB, "the agent has read one slot of each rank"
    second, run = started(node, root, range(2)), run_after(None)
    for trainer in second:
        assert [offer.iteration for offer in trainer.take()] == [1]
        trainer.join(run)
    assert slabs(agent) == [0, 1, 2, 3], "the slabs stay until the run has loaded"
    second[0].client.begin_run(BeginRun("second", (0, 1)))
    assert [held.rank for held in second[0].client.held(0.5)] == [0, 1, 2, 3], (
        "rank 1 has not loaded yet"
    )
    begin(second)
    assert [held.rank for held in second[0].client.held(60.0)] == [0, 1]
    assert slabs(agent) == [0, 1]
    assert memory_nbytes(agent, "RssShmem") < 0.6 * before
    message = next(line for line in node.log(root).read_text().splitlines() if "freed" in line)
    assert "freed the host memory of ranks that the run on this node does not have: " in message
    for rank in (2, 3):
        assert f"MiB of rank {rank} (iteration 1, in storage, of an earlier run)" in message


def test_a_departed_rank_that_is_connected_keeps_its_memory_until_it_disconnects(
    node: Node, root: Path
) -> None:
    first = started(node, root, range(2))
    agent = first[0].client.agent_pid
    assert not any(save_all(first, 1))
    first[0].hang_up()
    second = started(node, root, range(1))
    begin(second)
    second[0].client.held(0.5)
    assert slabs(agent) == [0, 1]
    first[1].hang_up()
    eventually("the slabs are freed", lambda: slabs(agent) == [0])


def test_ranks_of_one_run_may_join_in_separate_groups(node: Node, root: Path) -> None:
    """Two containers of one machine start such groups."""
    first = started(node, root, range(3))
    agent = first[0].client.agent_pid
    assert not any(save_all(first, 1))
    crash(first)
    second = started(node, root, range(2))
    for trainer in second:
        trainer.client.begin_run(BeginRun("second", (trainer.rank,)))
    eventually("rank 2 has departed", lambda: slabs(agent) == [0, 1])
    crash(second)
    third = started(node, root, range(2))
    assert [len(trainer.take()) for trainer in third] == [1, 1], "the memory of both ranks was kept"


def test_holders_of_memory_are_named_by_rank_size_and_save() -> None:
    gib = 2**30
    held = [
        HeldSlab(0, gib, -1, False, False, False),
        HeldSlab(1, gib, 5, True, False, False),
        HeldSlab(2, 2 * gib, 6, False, True, True),
        HeldSlab(3, gib, 6, False, True, False),
    ]
    assert describe_slabs(held) == (
        "5.0 GiB: 1.0 GiB of rank 0 (no checkpoint), 1.0 GiB of rank 1 (iteration 5, in "
        "storage), 2.0 GiB of rank 2 (iteration 6, being written, of an earlier run), "
        "1.0 GiB of rank 3 (iteration 6, not in storage, of an earlier run)"
    )
    assert describe_slabs([held[0]] * 20).endswith("(no checkpoint), 12 more")


def fitting(node: Node, root: Path, link: NodeLink) -> list[Need]:
    """Return the memory needs, as a start with one rank computes them before it reserves memory."""
    runs = SimpleNamespace(agree=lambda: "second")
    checkpointer: Any = SimpleNamespace(
        root=str(root), rank=0, config=node.config(), link=link, runs=runs
    )
    expected: Any = SimpleNamespace(nbytes=MIB, plan_nbytes=0)
    return node_memory.check_memory(checkpointer, expected)


@pytest.mark.parametrize("missing_nbytes", [0, 1])
def test_a_start_waits_until_memory_of_departed_ranks_is_committed_and_freed(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch, missing_nbytes: int
) -> None:
    first = started(node, root, range(2))
    agent, save_id = first[0].client.agent_pid, new_save_id()
    needed = slab_nbytes(2, MIB, 0)
    link = NodeLink(str(root), 0, node.config())

    def limits() -> list[Limit]:
        """Leave memory for the slab of one rank, and a few bytes less than for two."""
        left = needed - missing_nbytes if slabs(agent) == [0] else 0
        return [Limit("machine", "the machine", left)]

    monkeypatch.setattr(node_memory, "limits", limits)
    with blocked_shard(root, 1, 1, save_id) as unblock:
        data = [trainer.stage(1, save_id) for trainer in first]
        crash(first)
        second = started(node, root, range(1))
        begin(second)
        (own, departed) = second[0].client.held(0.5)
        assert (own.departed, departed.departed, departed.in_use) == (False, True, True)
        threading.Timer(0.5, unblock).start()
        if missing_nbytes:
            with pytest.raises(StorageError) as raised:
                fitting(node, root, link)
            assert re.search(
                rf"left; agent {agent} holds .*: .* of rank 0 \(iteration 1, in storage\)\n",
                str(raised.value),
            )
        else:
            assert [need.slab_nbytes for need in fitting(node, root, link)] == [needed]
    assert slabs(agent) == [0]
    assert [read_rank(stored(root, 1), trainer) for trainer in first] == data
    link.close(leave=False)
