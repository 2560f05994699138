"""Recovery of a lost node and its agent: other nodes return the checkpoints of its ranks.

The nodes run on this machine, each with a runtime directory and an agent, and talk over loopback.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.memory.slot import SlotState
from tests.support.cluster import Cluster, cluster
from tests.support.stored import read_rank, stored
from tests.support.trainer import blocked_open, content, eventually, new_save_id, run_after, suspend

#: Copies and parity on nodes of unequal size.
SCHEMES = [("copy", 2, (2, 1, 2), 1), ("xor", 4, (1, 2, 2, 1), 3)]


def assert_recovered(made: Cluster, rank: int, iterations: list[int]) -> None:
    trainer = made.trainers[rank]
    offers = trainer.take()
    assert [offer.iteration for offer in offers] == iterations
    for offer in offers:
        assert trainer.slab.slots[offer.slot].header.state == SlotState.STAGED
        expected = content(rank, offer.iteration, trainer.layout.nbytes)
        assert trainer.bytes_in(offer.slot) == expected
        meta = trainer.slab.slots[offer.slot].meta
        assert (meta.rank, meta.placement) == (rank, trainer.layout.placement)


def recover_lost(made: Cluster, scheme: str, group: int, lost: int, saves: list[str]) -> None:
    """Lose a node and the storage; restart the job and let the ranks of the new node recover."""
    made.lose(lost)
    for path in made.root.iterdir():
        # The agents of the remaining nodes still write there.
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()
    made.start(scheme, group)
    for rank in made.ranks[lost]:
        assert made.trainers[rank].take() == ()
        made.trainers[rank].client.recover(tuple(saves))


@pytest.mark.parametrize(("scheme", "group", "sizes", "holders"), SCHEMES)
def test_any_lost_node_recovers_its_checkpoints_without_storage(
    tmp_path: Path, scheme: str, group: int, sizes: tuple[int, ...], holders: int
) -> None:
    """The copies that it held for others are sent again when training resumes.

    The first node that is lost requests one save only, as if the other one was of another history.
    """
    with cluster(tmp_path, sizes, numel=5000) as made:
        made.start(scheme, group)
        for lost in range(len(sizes)):
            older, newer = 10 * lost + 5, 10 * lost + 10
            saves = []
            for iteration in (older, newer):
                saves.append(made.stage(iteration))
                made.await_held(iteration, holders)
            recover_lost(made, scheme, group, lost, saves if lost else saves[:1])
            for rank in made.ranks[lost]:
                assert_recovered(made, rank, [newer, older] if lost else [older])
            if lost:
                held_before = made.reported_held(newer)
                made.join(run_after(saves[1], newer))
                made.await_held(newer, holders, beyond=held_before)


def test_the_replacement_of_a_lost_node_persists_its_unwritten_save(tmp_path: Path) -> None:
    with cluster(tmp_path, (1, 1)) as made:
        made.start("copy")
        assert {made.stage(5)} == {made.trainers[rank].outcome().save_id for rank in range(2)}
        save_id = new_save_id()
        shard = made.root / file_names.iteration_dir(10) / file_names.shard_name(1, save_id)
        with blocked_open(shard) as unblock:
            made.stage(10, save_id)
            made.await_held(10, 1)
            made.lose(1)
            unblock()
        assert (made.root / file_names.TRACKER).read_text() == "5"
        made.start("copy")
        made.trainers[1].client.recover((save_id,))
        assert_recovered(made, 1, [10])
        made.join(run_after(save_id, 10))
        eventually("the commit", lambda: (made.root / file_names.TRACKER).read_text() == "10")
        for rank, trainer in made.trainers.items():
            expected = content(rank, 10, trainer.layout.nbytes)
            assert read_rank(stored(made.root, 10), trainer) == expected
            eventually("a durable slot", lambda member=trainer: member.take()[0].durable)
            assert trainer.client.poll().finished == (), "a rank gets results of its own saves only"


def test_the_loss_of_two_nodes_of_a_group_is_reported_as_unrecoverable(tmp_path: Path) -> None:
    with cluster(tmp_path, (1, 1, 1, 1)) as made:
        made.start("xor", 4)
        save = made.stage(10)
        made.await_held(10, 3)
        made.lose(1, 2)
        made.start("xor", 4)
        for lost in (1, 2):
            made.trainers[lost].client.recover((save,))
            assert made.trainers[lost].take() == ()
            assert f"rank {lost}: no node has any of its requested checkpoints" in made.log(lost)
        assert [offer.iteration for offer in made.trainers[0].take()] == [10]


def test_after_a_swap_of_two_nodes_only_the_former_agent_writes_a_shard(tmp_path: Path) -> None:
    """A second writer would overwrite a shard that the first may have committed.

    Only the agent that holds rank 0's part may commit, wherever rank 0 is now.
    """
    with cluster(tmp_path, (1, 1)) as made:
        made.start("copy")
        made.join(run_after(None))
        save_id = made.trainers[0].new_save_id()
        shard = made.root / file_names.iteration_dir(10) / file_names.shard_name(1, save_id)
        with blocked_open(shard) as unblock:
            made.stage(10, save_id)
            made.await_held(10, 1)
            made.nodes.reverse()
            made.start("copy")
            for rank in range(2):
                trainer = made.trainers[rank]
                assert trainer.take() == ()
                assert trainer.client.saves_of_node() == ((10, save_id),)
                trainer.client.recover((save_id,))
                assert_recovered(made, rank, [10])
            made.join(run_after(save_id, 10))
            assert not (made.root / file_names.TRACKER).exists()
            unblock()
        end = made.root / file_names.iteration_dir(10) / file_names.end_name(save_id)
        eventually("the commit", end.exists)
        for rank, trainer in made.trainers.items():
            expected = content(rank, 10, trainer.layout.nbytes)
            assert read_rank(stored(made.root, 10), trainer) == expected
        # The nodes were swapped, so the former node of rank 0 is node 1.
        for rank, node in ((0, 1), (1, 0)):
            assert re.findall(r"rank (\d): persisted iteration 10", made.log(node)) == [str(rank)]
        assert {made.stage(20)} == {made.trainers[rank].outcome().save_id for rank in range(2)}, (
            "a rank gets no results of an earlier run"
        )
        assert (made.root / file_names.TRACKER).read_text() == "20"


def recovering(made: Cluster, save_id: str, hung: int = 0) -> None:
    """Lose node 1; let its next trainer request a save, and hang up without waiting.

    Args: `hung`: agent that is suspended before the request.
    """
    made.lose(1)
    made.start("copy")
    if hung:
        suspend(hung)
    request = p.Recover((save_id,), 0.0, huge_pages=True)
    assert not made.trainers[1].client._ask(request, p.Recovered)[0].ended
    made.trainers[1].hang_up()


def test_an_ended_recovery_does_not_answer_the_next_trainer(tmp_path: Path) -> None:
    with cluster(tmp_path, (1, 1)) as made:
        made.start("copy")
        save_id = made.stage(10)
        made.await_held(10, 1)
        recovering(made, new_save_id())
        eventually("the end of the recovery", lambda: "no node has any of its" in made.log(1))
        made.trainers[1] = made.nodes[1].trainer(made.root, 1, 2)
        made.trainers[1].client.recover((save_id,))
        assert_recovered(made, 1, [10])


def test_a_late_recovery_does_not_replace_the_slots_of_the_next_trainer(tmp_path: Path) -> None:
    """The next trainer loads from storage, and has attached memory of its own."""
    with cluster(tmp_path, (1, 1)) as made:
        made.start("copy")
        save_id = made.stage(10)
        made.await_held(10, 1)
        (holder,) = made.nodes[0].agents()
        recovering(made, save_id, hung=holder)
        later = made.trainers[1] = made.nodes[1].trainer(made.root, 1, 2)
        newer = new_save_id()
        slot = later.begin(20, newer)
        os.kill(holder, signal.SIGCONT)
        eventually("the recovery", lambda: "recovered iteration 10" in made.log(1))
        later.fill(slot, content(1, 20, later.layout.nbytes))
        slot.set_state(SlotState.STAGED)
        later.client.staged(slot.index)
        made.trainers[0].stage(20, newer)
        for trainer in made.trainers.values():
            outcome = trainer.outcome()
            assert (outcome.iteration, outcome.error) == (20, None)
        assert (made.root / file_names.TRACKER).read_text() == "20"


def test_a_lost_node_with_one_slot_gets_its_only_checkpoint_from_others(tmp_path: Path) -> None:
    with cluster(tmp_path, (1, 1, 1), slots=1) as job:
        job.start("xor", 3)
        for iteration in (1, 2):
            for trainer in job.trainers.values():
                if iteration == 2:
                    trainer.outcome()
            save_id = job.stage(iteration)
            job.await_held(iteration, 2)
        job.lose(0)
        job.start("xor", 3)
        job.trainers[0].client.recover((save_id,))
        assert_recovered(job, 0, [2])
