"""An agent learns which run its ranks save for, and drops what is not of that run's history."""

from __future__ import annotations

from pathlib import Path

from megatron_flashckpt.catalog.lineage import Save, descent
from megatron_flashckpt.file_format.file_names import save_name
from megatron_flashckpt.file_format.run_object import RunObject
from megatron_flashckpt.memory.slot import SlotState
from tests.agent.conftest import Node
from tests.support.trainer import FakeTrainer, eventually


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


def test_slots_of_another_history_are_emptied(node: Node, root: Path) -> None:
    """Training was set back to iteration 10, so iteration 20 has never happened."""
    trainer = begun(node, root)
    assert held(trainer) == [10, 20]
    trainer.client.open_run(resumed(2, SAVES[0]))
    assert held(trainer) == [10]


def test_slots_of_the_history_are_kept(node: Node, root: Path) -> None:
    trainer = begun(node, root)
    trainer.client.open_run(resumed(2, SAVES[1]))
    assert held(trainer) == [10, 20]


def test_nothing_is_kept_of_what_a_run_from_scratch_does_not_continue(
    node: Node, root: Path
) -> None:
    trainer = begun(node, root)
    trainer.client.open_run(RunObject(name="000002-0002"))
    assert held(trainer) == []
    for iteration, save_id in SAVES:
        line = f"iteration {iteration} (save {save_id}), which storage lacks, is dropped"
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
    first = node.trainer(root)
    assert first.client.facts is not None
    assert first.client.facts.run_number == 0
    first.stage(1, "000007-abcd.00001.1", state=SlotState.KEPT)
    eventually("the result", lambda: first.client.poll(0.5).finished)
    first.hang_up()
    again = node.trainer(root)
    assert again.client.facts is not None
    assert again.client.facts.run_number == 7
