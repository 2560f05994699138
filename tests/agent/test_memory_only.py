"""Saves to host memory only: never written, restored like others, and kept if the agent ends."""

from __future__ import annotations

from pathlib import Path

from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.memory.slot import SlotState
from tests.agent.conftest import ALSO_IN_A_BUCKET, Node
from tests.support.stored import assert_intact, iterations_in, names_in, read_rank, stored
from tests.support.trainer import (
    FakeTrainer,
    blocked_shard,
    content,
    eventually,
    is_alive,
    new_save_id,
    run_after,
)

KEPT = SlotState.KEPT


def offered(trainer: FakeTrainer) -> list[tuple[int, bool]]:
    return [(offer.iteration, offer.durable) for offer in trainer.take()]


def test_durable_and_memory_only_saves_continue_while_one_is_written(
    node: Node, root: Path
) -> None:
    """Storage hangs during two memory-only saves; memory holds the newest checkpoint throughout."""
    trainer = node.trainer(root)
    slow = new_save_id()
    with blocked_shard(root, 4, 0, slow) as unblock:
        trainer.stage(4, slow)
        assert trainer.keep(6).kept
        assert [offered_iteration for offered_iteration, _ in offered(trainer)] == [6, 4]
        # One slot is being written and the other is the newest, so this save waits or is skipped.
        assert trainer.client.acquire(0.2) == -1
        assert [offered_iteration for offered_iteration, _ in offered(trainer)] == [6, 4]
        unblock()
        assert trainer.outcome().error is None
    assert trainer.save(8).error is None
    assert offered(trainer) == [(8, True), (6, False)]
    assert iterations_in(root) == [4, 8]
    assert_intact(root, 8, [trainer])


# ---------------------------------------------------------------------- when the agent leaves


def assert_the_agent_leaves(agent: int) -> None:
    eventually("the end of the agent", lambda: not is_alive(agent))


def test_a_trainer_that_returns_at_the_last_moment_finds_its_memory(node: Node, root: Path) -> None:
    config = node.config(grace_s=0.2)
    trainer = node.trainer(root, config=config)
    agent, save_id = trainer.client.agent_pid, new_save_id()
    with blocked_shard(root, 6, 0, save_id) as unblock:
        data = trainer.stage(6, save_id, state=KEPT)
        assert trainer.outcome().kept
        assert trainer.slab is not None
        (slot,) = (slot for slot in trainer.slab.slots if slot.header.state == KEPT)
        trainer.client.close()
        eventually("the slot is being written", lambda: slot.header.state == SlotState.STAGED)
        again = node.trainer(root, config=config)
        assert again.client.agent_pid == agent
        (offer,) = again.take()
        assert again.bytes_in(offer.slot) == data
        again.join(run_after(offer.save_id, 6))
        unblock()
        eventually("the commit", (root / file_names.TRACKER).exists)
    assert again.keep(7).kept
    again.hang_up()
    assert_the_agent_leaves(agent)
    assert read_rank(stored(root, 7), again) == content(0, 7, again.layout.nbytes)


def test_a_damaged_description_costs_no_other_save(node: Node, root: Path) -> None:
    """The newest save alone would be written."""
    trainer = node.trainer(root)
    agent = trainer.client.agent_pid
    for iteration in (5, 6):
        assert trainer.keep(iteration).kept
    assert trainer.slab is not None
    (newest,) = (slot for slot in trainer.slab.slots if slot.header.iteration == 6)
    trainer.slab.memory[trainer.slab.geometry.meta_offset(newest.index) + 5] ^= 1
    trainer.hang_up(leave=True)
    assert_the_agent_leaves(agent)
    assert read_rank(stored(root, 5), trainer) == content(0, 5, trainer.layout.nbytes)


@ALSO_IN_A_BUCKET
def test_agents_of_two_nodes_write_the_newest_save_that_all_ranks_have(
    node: Node, other_node: Node, root: Path | str
) -> None:
    """Rank 1 died during the copy of iteration 7; its node cannot know that 6 remains elsewhere."""
    nodes = (node, other_node)
    trainers = [
        saves_of_node.trainer(
            root, rank, 2, config=saves_of_node.config(grace_s=0.5, commit_timeout_s=2.0)
        )
        for rank, saves_of_node in enumerate(nodes)
    ]
    six, seven = new_save_id(), new_save_id()
    for trainer in trainers:
        trainer.stage(6, six, state=KEPT)
        assert trainer.outcome().kept
    trainers[0].stage(7, seven, state=KEPT)
    assert trainers[0].outcome().kept
    assert trainers[1].begin(7, seven) is not None
    agents = [trainer.client.agent_pid for trainer in trainers]
    for trainer in trainers:
        trainer.hang_up()
    for agent in agents:
        assert_the_agent_leaves(agent)
    assert_intact(root, 6, trainers)
    left = [name for name in names_in(root) if name.startswith(file_names.iteration_dir(7))]
    assert not [name for name in left if name.endswith(".safetensors")]
