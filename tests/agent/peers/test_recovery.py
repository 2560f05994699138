"""A node is lost, its agent too: the replacement gets its ranks' checkpoints from other nodes.

Several nodes on this machine, a runtime directory and an agent each, talk over loopback.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

import pytest

from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.memory.slot import SlotState
from tests.agent.test_shard_writer import read_rank, stored
from tests.support.cluster import Cluster, cluster
from tests.support.trainer import content, eventually, held_back, new_save_id

SCHEMES = [
    ("copy", 2, (2, 2), 1),
    ("copy", 2, (2, 1, 2), 1),
    ("xor", 3, (2, 2, 2), 2),
    ("xor", 4, (1, 2, 2, 1), 3),
]


def assert_recovered(made: Cluster, rank: int, iterations: list[int]) -> None:
    trainer = made.trainers[rank]
    offers = trainer.take()
    assert [offer.iteration for offer in offers] == iterations
    for offer in offers:
        assert trainer.slab is not None
        assert trainer.slab.slots[offer.slot].header.state == SlotState.STAGED
        expected = content(rank, offer.iteration, trainer.layout.nbytes)
        assert trainer.bytes_in(offer.slot) == expected
        meta = trainer.slab.slots[offer.slot].meta
        assert (meta.rank, meta.placement) == (rank, trainer.layout.placement)


def recover_lost(made: Cluster, scheme: str, group: int, lost: int, saves: list[str]) -> None:
    """Lose a node, storage too; restart the job and let the new node's ranks recover."""
    made.lose(lost)
    for path in made.root.iterdir():
        # The other agents still write there.
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()
    made.start(scheme, group)
    for rank in made.ranks[lost]:
        assert made.trainers[rank].take() == ()
        made.trainers[rank].client.recover(tuple(saves))


@pytest.mark.parametrize(("scheme", "group", "sizes", "holders"), SCHEMES)
def test_each_node_in_turn_is_lost_and_gets_its_checkpoints_back_without_storage(
    tmp_path: Path, scheme: str, group: int, sizes: tuple[int, ...], holders: int
) -> None:
    with cluster(tmp_path, sizes, numel=5000) as made:
        made.start(scheme, group)
        for lost in range(len(sizes)):
            iterations = [10 * lost + 5, 10 * lost + 10]
            saves = []
            for iteration in iterations:
                saves.append(made.stage(iteration))
                made.await_held(iteration, holders)
            recover_lost(made, scheme, group, lost, saves)
            for rank in made.ranks[lost]:
                assert_recovered(made, rank, iterations[::-1])


@pytest.mark.parametrize(("scheme", "group", "sizes", "holders"), SCHEMES[1:3])
def test_what_a_lost_node_held_for_others_is_made_again_when_training_goes_on(
    tmp_path: Path, scheme: str, group: int, sizes: tuple[int, ...], holders: int
) -> None:
    with cluster(tmp_path, sizes) as made:
        made.start(scheme, group)
        newer = made.stage(20)
        made.await_held(20, holders)
        for lost in (1, 2, 0):
            recover_lost(made, scheme, group, lost, [newer])
            for rank in made.ranks[lost]:
                assert_recovered(made, rank, [20])
            held_before = made.said_held(20)
            for trainer in made.trainers.values():
                trainer.client.adopt(newer, 20)
            made.await_held(20, holders, beyond=held_before)


def test_a_save_that_a_lost_node_had_not_persisted_is_made_durable_by_its_replacement(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, (1, 1)) as made:
        made.start("copy")
        assert {made.stage(5)} == {made.trainers[rank].outcome().save_id for rank in range(2)}
        save_id = new_save_id()
        shard = made.root / file_names.iteration_dir(10) / file_names.shard_name(1, save_id)
        with held_back(shard) as let_go:
            made.stage(10, save_id)
            made.await_held(10, 1)
            made.lose(1)
            let_go()
        assert (made.root / file_names.TRACKER).read_text() == "5"
        made.start("copy")
        made.trainers[1].client.recover((save_id,))
        assert_recovered(made, 1, [10])
        for trainer in made.trainers.values():
            trainer.client.adopt(save_id, 10)
        eventually("the commit", lambda: (made.root / file_names.TRACKER).read_text() == "10")
        for rank, trainer in made.trainers.items():
            expected = content(rank, 10, trainer.layout.nbytes)
            assert read_rank(stored(made.root, 10), trainer) == expected
            eventually("a durable slot", lambda it=trainer: it.take()[0].durable)
            assert trainer.client.poll().finished == (), "no news of what it did not save itself"


def test_two_lost_nodes_of_a_group_are_not_recovered_and_it_is_said(tmp_path: Path) -> None:
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


def test_ranks_that_the_launcher_gave_to_other_nodes_find_their_checkpoints(tmp_path: Path) -> None:
    """Node 0 is lost; the new node becomes the last one, as torchrun may have it."""
    with cluster(tmp_path, (1, 1, 1)) as made:
        made.start("copy")
        save = made.stage(10)
        made.await_held(10, 1)
        made.lose(0)
        made.nodes.append(made.nodes.pop(0))
        made.start("copy")
        for rank in range(3):
            made.trainers[rank].client.recover((save,))
            assert_recovered(made, rank, [10])


def test_after_two_nodes_were_swapped_each_shard_is_written_once_by_its_former_agent(
    tmp_path: Path,
) -> None:
    """A second writer would overwrite a shard that may be committed by then."""
    with cluster(tmp_path, (1, 1)) as made:
        made.start("copy")
        save_id = new_save_id()
        shard = made.root / file_names.iteration_dir(10) / file_names.shard_name(1, save_id)
        with held_back(shard) as let_go:
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
            for trainer in made.trainers.values():
                trainer.client.adopt(save_id, 10)
            assert not (made.root / file_names.TRACKER).exists()
            let_go()
        eventually("the commit", (made.root / file_names.TRACKER).exists)
        for rank, trainer in made.trainers.items():
            expected = content(rank, 10, trainer.layout.nbytes)
            assert read_rank(stored(made.root, 10), trainer) == expected
        # The nodes were swapped, so node 1 is the former one of rank 0.
        for rank, node in ((0, 1), (1, 0)):
            assert re.findall(r"rank (\d): persisted iteration 10", made.log(node)) == [str(rank)]
        assert {made.stage(20)} == {made.trainers[rank].outcome().save_id for rank in range(2)}


def claimed(made: Cluster) -> None:
    """Have a new run claim the save directory, and all agents know of it."""
    key = made.trainers[0].claim()
    for trainer in made.trainers.values():
        trainer.client.hold(key)


def test_a_save_that_was_being_written_when_rank_0_moved_is_given_up_and_the_next_is_committed(
    tmp_path: Path,
) -> None:
    """Only the agent that has rank 0 now may commit, and it does not have this save of rank 0."""
    with cluster(tmp_path, (1, 1)) as made:
        made.start("copy")
        claimed(made)
        save_id = new_save_id()
        shard = made.root / file_names.iteration_dir(10) / file_names.shard_name(1, save_id)
        with held_back(shard) as let_go:
            made.stage(10, save_id)
            made.await_held(10, 1)
            made.nodes.reverse()
            made.start("copy")
            claimed(made)
            for rank, trainer in made.trainers.items():
                trainer.client.recover((save_id,))
                assert_recovered(made, rank, [10])
            for trainer in made.trainers.values():
                trainer.client.adopt(save_id, 10)
            let_go()
        for node in range(2):
            eventually("it is given up", lambda node=node: "10 was not saved" in made.log(node))
        assert not (made.root / file_names.TRACKER).exists()
        newer = made.stage(20)
        for trainer in made.trainers.values():
            assert trainer.outcome().save_id == newer, "no news of what an earlier run has staged"
        assert (made.root / file_names.TRACKER).read_text() == "20"


def test_a_rank_recovers_only_what_is_wanted(tmp_path: Path) -> None:
    with cluster(tmp_path, (1, 1)) as made:
        made.start("copy")
        older, newer = made.stage(10), made.stage(20)
        made.await_held(20, 1)
        recover_lost(made, "copy", 2, 0, [older])
        assert_recovered(made, 0, [10])
        assert newer not in [offer.save_id for offer in made.trainers[0].take()]
