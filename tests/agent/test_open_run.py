"""An agent learns which run its ranks save for, and drops what is not of that run's history."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flashckpt.catalog.lineage import Save, descent
from megatron_flashckpt.file_format.file_names import OWN, run_number, save_name
from megatron_flashckpt.file_format.run_object import RunObject
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.save.run_opener import RunOpener
from tests.agent.conftest import Node
from tests.support.trainer import FakeTrainer, eventually, remove_tree


def test_a_process_gives_no_number_to_two_runs(node: Node, root: Path) -> None:
    """`flashckpt/` was removed between two loads of one process, before the first save."""
    link = NodeLink(str(root), 0, node.config())
    opener = RunOpener(str(root), 0, 1, link, node.config())
    for number in (1, 2, 3):
        opener.open(None, (), "scratch")
        assert run_number(opener.run.name or "") == number
        remove_tree(root / OWN)
    link.close(leave=True)


def held(trainer: FakeTrainer) -> list[int]:
    return sorted(offer.iteration for offer in trainer.take())


def resumed(number: int, save: Save) -> RunObject:
    return RunObject(
        name=f"{number:06d}-{number:04x}",
        ancestors=descent(save, ()),
        save_id=save.save_id,
        iteration=save.iteration,
        source="memory",
    )


FIRST = RunObject(name="000001-0001")
SAVES = [Save(10, save_name(FIRST.name, 1)), Save(20, save_name(FIRST.name, 2))]


def begun(node: Node, root: Path) -> FakeTrainer:
    """Return a restarted trainer of a run that has two saves in memory."""
    first = node.trainer(root)
    first.client.open_run(FIRST)
    for iteration, save_id in SAVES:
        assert first.keep(iteration, save_id).error is None
    first.hang_up()
    return node.trainer(root)


@pytest.mark.parametrize(
    ("run", "kept"),
    [
        (resumed(2, SAVES[0]), [10]),  # iteration 20 has never happened
        (resumed(2, SAVES[1]), [10, 20]),
        (RunObject(name="000002-0002"), []),
    ],
    ids=["set back", "continued", "from scratch"],
)
def test_slots_of_another_history_are_emptied(
    node: Node, root: Path, run: RunObject, kept: list[int]
) -> None:
    trainer = begun(node, root)
    assert held(trainer) == [10, 20]
    trainer.client.open_run(run)
    assert held(trainer) == kept
    for iteration, save_id in SAVES:
        line = f"iteration {iteration} (save {save_id}), which storage lacks, is dropped"
        if iteration not in kept:
            eventually(line, lambda line=line: line in node.log(root).read_text())  # type: ignore[misc]


def test_a_repeated_message_and_one_of_a_former_run_empty_nothing(node: Node, root: Path) -> None:
    """A rank repeats it after a lost connection; a job that was started twice sends it late."""
    trainer = begun(node, root)
    run = resumed(2, SAVES[1])
    trainer.client.open_run(run)
    trainer.take()
    assert trainer.keep(30, save_name(run.name, 1)).error is None
    trainer.client.open_run(run)
    trainer.client.open_run(FIRST)
    assert held(trainer) == [20, 30]


def test_a_new_connection_learns_the_highest_run_that_memory_holds(node: Node, root: Path) -> None:
    """The next run takes a higher number, though the directory may have been emptied."""
    for expected in (0, 7):
        trainer = node.trainer(root)
        assert trainer.client.facts is not None
        assert trainer.client.facts.run_number == expected
        trainer.keep(1, "000007-abcd.00001.1")
        trainer.hang_up()
