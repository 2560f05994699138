"""Saves that training has abandoned while agents still write them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatron_flashckpt.agent import commit_core as core
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.file_format import file_names
from tests.agent.conftest import Node
from tests.agent.test_failures import assert_intact, files_of_ours, save_all
from tests.support.trainer import blocked_open, eventually, is_alive, new_save_id, run_after


@pytest.mark.parametrize("slow", [0, 1])
def test_a_save_is_given_up_if_rank_0_moves_to_another_node(
    node: Node, other_node: Node, root: Path, slow: int
) -> None:
    """A restart has exchanged the two ranks while one shard was still being written."""
    trainers = [node.trainer(root, 0, 2), other_node.trainer(root, 1, 2)]
    trainers[1].join(trainers[0].open_run())
    kept, cut_short = (trainers[0].new_save_id() for _ in range(2))
    for trainer in trainers:
        trainer.stage(5, kept)
    assert [trainer.outcome().error for trainer in trainers] == [None, None]
    directory = root / file_names.iteration_dir(6)
    with blocked_open(directory / file_names.shard_name(slow, cut_short)):
        for trainer in trainers:
            trainer.stage(6, cut_short)
        other = range(1 - slow, 2 - slow)
        record = directory / file_names.record_name(other, cut_short)
        eventually("the record of the other rank", record.exists)
        for trainer in trainers:
            trainer.hang_up()
        later = [other_node.trainer(root, 0, 2), node.trainer(root, 1, 2)]
        later[1].join(later[0].open_run(Save(5, kept), policy="take_over"))
        eventually("the removal of the record", lambda: not record.exists())
    eventually(
        "the removal of both shards", lambda: not [n for n in files_of_ours(root) if cut_short in n]
    )
    eventually("both slots are read", lambda: save_all(later, 7) == [None, None])
    assert save_all(later, 8) == [None, None]
    assert_intact(root, 8, later)
    for place in (node, other_node):
        log = place.log(root).read_text()
        assert "iteration 6 was not saved: a crash interrupted it; training resumed from" in log
        assert "ERROR" not in log


def test_queued_shards_of_an_abandoned_save_are_not_written(node: Node, root: Path) -> None:
    """Before, they were written in full and removed; the next saves waited for their slots."""
    config = node.config(persist_threads=1)
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    save_id = new_save_id()
    shard = root / file_names.iteration_dir(1) / file_names.shard_name(0, save_id)
    log = node.log(root)
    with blocked_open(shard) as unblock:
        for trainer in trainers:
            trainer.stage(1, save_id)
            trainer.hang_up()
        later = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
        run = run_after(None)
        for trainer in later:
            trainer.join(run)
        eventually("the end of the save", lambda: "iteration 1 was not saved" in log.read_text())
        unblock()
        assert save_all(later, 2) == [None, None]
    assert "rank 1: persisted iteration 2" in log.read_text()
    assert "rank 1: persisted iteration 1" not in log.read_text()
    assert_intact(root, 2, later)


def ranks_out_of_step(node: Node, root: Path, **agent: float) -> int:
    """Return the agent of two dead ranks, of which only one has staged the last save."""
    config = node.config(**agent)
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    run = run_after(None)
    for trainer in trainers:
        trainer.join(run)
    assert save_all(trainers, 4) == [None, None]
    trainers[0].stage(7, trainers[0].new_save_id())
    for trainer in trainers:
        trainer.hang_up()
    return trainers[0].client.agent_pid


@pytest.mark.parametrize(
    ("connected", "gone", "fails"),
    [((), (1,), True), ((0,), (1,), False), ((), (0,), False), ((), (2,), False)],
    ids=["all ended", "one may come back", "its part is there", "not of this job"],
)
def test_a_save_fails_once_nobody_can_stage_the_missing_part(
    connected: tuple[int, ...], gone: tuple[int, ...], *, fails: bool
) -> None:
    machine = core.CommitCore("here", 2, 0.0, 3600.0, core.Pace())
    machine.note(0.0, core.Joined(0))
    machine.note(0.0, core.Connected(frozenset(connected), frozenset(gone)))
    assert isinstance(machine.next(0.0), core.Fail) is fails


def test_a_save_that_cannot_be_complete_does_not_delay_an_agent_after_sigterm(
    node: Node, root: Path
) -> None:
    agent = ranks_out_of_step(node, root, sigterm_timeout_s=15.0)
    os.kill(agent, signal.SIGTERM)
    eventually("the end of the agent", lambda: not is_alive(agent), 5.0)


def test_a_save_that_cannot_be_complete_does_not_prolong_the_grace_time(
    node: Node, root: Path
) -> None:
    agent = ranks_out_of_step(node, root, grace_s=0.5)
    eventually("the end of the agent", lambda: not is_alive(agent), 5.0)
