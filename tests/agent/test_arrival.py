"""A shard is written while its trainer copies: not ahead of it, and nothing counts before."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.agent.arrival import Arrival, Turns, WithdrawnError
from megatron_flashckpt.agent.committer import Committer
from megatron_flashckpt.agent.node import AgentOptions, Trainer
from megatron_flashckpt.agent.node import Node as AgentNode
from megatron_flashckpt.agent.protocol import Copied
from megatron_flashckpt.agent.saves import Saves
from megatron_flashckpt.agent.slots import RankSlots
from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.layout import names
from megatron_flashckpt.layout.shard_file import CHUNK_NBYTES
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotState
from tests.agent.conftest import Node
from tests.agent.test_leftovers import plant
from tests.agent.test_persist import read_rank, stored
from tests.agent.trainer import (
    PATIENCE_S,
    FakeTrainer,
    content,
    eventually,
    held_back,
    is_alive,
    new_save_id,
    suspend,
)

#: Of a shard of three chunks, the last one shorter.
NUMEL = 1_600_000


def shard(trainer: FakeTrainer, iteration: int, save_id: str) -> Path:
    directory = trainer.root / names.iteration_dir(iteration)
    return directory / names.shard_name(trainer.rank, save_id)


def written(path: Path, trainer: FakeTrainer) -> bytes:
    """Return the data section of a shard file, as far as there is one."""
    try:
        return path.read_bytes()[-trainer.layout.nbytes :]
    except FileNotFoundError:
        return b""


class Copying:
    """A trainer in the middle of its copies: what is not copied yet is something else."""

    def __init__(self, trainer: FakeTrainer, iteration: int, save_id: str | None = None) -> None:
        self.trainer, self.iteration = trainer, iteration
        self.save_id = save_id or new_save_id()
        self.data = content(trainer.rank, iteration, trainer.layout.nbytes)
        self.path = shard(trainer, iteration, self.save_id)
        slot = trainer.begin(iteration, self.save_id, PATIENCE_S)
        assert slot is not None
        self.slot: Slot = slot
        trainer.fill(slot, b"\xee" * len(self.data))

    def copy(self, nbytes: int) -> None:
        """Go on to `nbytes`, and say so."""
        with self.slot.data() as target:
            target[:nbytes] = self.data[:nbytes]
        self.trainer.client.copied(self.slot.index, nbytes)

    def await_written(self, nbytes: int) -> None:
        """Wait until so much is in the file; nothing more may be, as far as can be seen."""

        def is_written() -> bool:
            found = written(self.path, self.trainer)
            assert b"\xee" * 64 not in found
            return found[:nbytes] == self.data[:nbytes]

        eventually(f"{nbytes} bytes in {self.path}", is_written)

    def hand_over(self) -> None:
        self.trainer.fill(self.slot, self.data)
        self.slot.set_state(SlotState.STAGED)
        self.trainer.client.staged(self.slot.index)

    def await_removed(self) -> None:
        eventually(f"{self.path.parent} is gone", lambda: not self.path.parent.exists())


def half_written(trainer: FakeTrainer, iteration: int, save_id: str | None = None) -> Copying:
    """Return a save of which the agent has written one chunk, of one and a half that are there."""
    copying = Copying(trainer, iteration, save_id)
    copying.copy(CHUNK_NBYTES * 3 // 2)
    copying.await_written(CHUNK_NBYTES)
    return copying


def test_chunks_are_written_before_the_rest_is_copied_and_none_before_it_is(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root, numel=NUMEL)
    copying = Copying(trainer, 1)
    copying.copy(0)
    eventually("the file", copying.path.exists)
    copying.copy(CHUNK_NBYTES - 1)
    copying.copy(CHUNK_NBYTES)
    copying.await_written(CHUNK_NBYTES)
    copying.copy(CHUNK_NBYTES + 77)
    copying.copy(2 * CHUNK_NBYTES)
    copying.await_written(2 * CHUNK_NBYTES)
    assert written(copying.path, trainer)[2 * CHUNK_NBYTES :].strip(b"\0") == b""
    assert copying.slot.header.state == SlotState.STAGING
    assert os.listdir(copying.path.parent) == [copying.path.name], "no record"
    header = copying.path.read_bytes()[: -trainer.layout.nbytes]
    assert header == bytes(len(header)), "no header"
    assert trainer.client.poll().pending == 0, "nor does it count as a save"
    copying.hand_over()
    outcome = trainer.outcome()
    assert (outcome.save_id, outcome.error) == (copying.save_id, None)
    assert written(copying.path, trainer) == copying.data
    assert read_rank(stored(root, 1), trainer) == copying.data, "digests and all"


def test_all_may_be_written_before_the_doorbell_and_counts_only_then(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root, numel=NUMEL)
    copying = Copying(trainer, 1)
    copying.copy(len(copying.data))
    copying.await_written(len(copying.data))
    assert os.listdir(copying.path.parent) == [copying.path.name]
    copying.hand_over()
    assert trainer.outcome().error is None
    assert read_rank(stored(root, 1), trainer) == copying.data
    (offer,) = trainer.take()
    assert offer.digests == stored(root, 1).shard(0).digests


def test_what_a_killed_trainer_was_copying_leaves_nothing_and_its_slot_is_used_again(
    node: Node, root: Path
) -> None:
    save_id = new_save_id()
    process = node.process(root, iterations=[1, 2], save_id=save_id, stop="staging", numel=NUMEL)
    process.stopped()
    trainer = node.trainer(root.with_name("other"), numel=NUMEL)
    path = root / names.iteration_dir(2) / names.shard_name(0, save_id)
    eventually("a chunk is written", lambda: written(path, trainer)[:1].strip(b"\0"))
    process.kill()
    eventually("nothing is left", lambda: not path.parent.exists())
    successor = node.trainer(root, numel=NUMEL)
    (offer,) = successor.take()
    assert offer.iteration == 1
    successor.client.adopt(offer.save_id, 1)
    for iteration in (2, 3, 4):
        assert successor.save(iteration).error is None
        expected = content(0, iteration, successor.layout.nbytes)
        assert read_rank(stored(root, iteration), successor) == expected


def test_a_trainer_that_is_stopped_in_its_copies_keeps_no_other_from_being_written(
    node: Node, root: Path
) -> None:
    config = node.config(persist_threads=1, sigterm_timeout_s=1.0)
    save_id = new_save_id()
    # Whoever comes first starts the agent.
    trainer = node.trainer(root, 1, 2, config=config, numel=NUMEL)
    process = node.process(
        root, world_size=2, iterations=[1], save_id=save_id, stop="staging", numel=NUMEL
    )
    agent = process.stopped()
    path = root / names.iteration_dir(1) / names.shard_name(0, save_id)
    eventually("it is written", lambda: written(path, trainer)[:1].strip(b"\0"))
    suspend(process.process.pid)
    for iteration in (1, 2):
        save = save_id if iteration == 1 else new_save_id()
        trainer.stage(iteration, save)
        record = shard(trainer, iteration, save).with_name(names.record_name(1, save))
        eventually(f"{record}", record.exists)
    os.kill(agent, signal.SIGTERM)
    eventually("the agent leaves at its deadline", lambda: not is_alive(agent))
    assert not path.exists()


@pytest.mark.parametrize("said", [True, False], ids=["abandoned", "asks for the next"])
def test_a_copy_that_failed_leaves_nothing_and_its_slot_is_free_at_once(
    node: Node, root: Path, said: bool
) -> None:
    trainer = node.trainer(root, numel=NUMEL)
    assert trainer.save(1).error is None
    copying = half_written(trainer, 2)
    if said:
        trainer.client.abandon(2, copying.save_id, "its copy failed")
        eventually("its shard is gone", lambda: not copying.path.exists())
    slot = trainer.begin(3, new_save_id(), wait_s=0.0)  # as with `busy: skip`
    assert slot is not None
    assert slot.index == copying.slot.index, "the other one holds what can be restored"
    assert not copying.path.exists()
    assert (copying.path.parent.exists()) == said, "but for the note to other nodes"
    assert trainer.save(4).error is None


def test_what_was_begun_is_not_handed_over_as_something_else(node: Node, root: Path) -> None:
    trainer = node.trainer(root, numel=NUMEL)
    copying = half_written(trainer, 1)
    copying.slot.set_state(SlotState.KEPT)
    with pytest.raises(AgentError, match=r"KEPT.*was to be.*STAGED"):
        trainer.client.staged(copying.slot.index)
    copying.hand_over()
    assert trainer.outcome().error is None
    assert read_rank(stored(root, 1), trainer) == copying.data


def test_an_agent_that_is_killed_in_the_middle_has_a_successor_that_writes_all(
    node: Node, root: Path
) -> None:
    trainer = node.trainer(root, numel=NUMEL)
    assert trainer.save(1).error is None
    copying = half_written(trainer, 2)
    agent = trainer.client.agent_pid
    os.kill(agent, signal.SIGKILL)
    eventually("its end", lambda: not is_alive(agent))
    copying.copy(2 * CHUNK_NBYTES)  # the trainer does not notice before the doorbell
    with pytest.raises(AgentError, match="gone"):
        copying.hand_over()
    assert trainer.reconnect() == (copying.save_id,)
    assert trainer.outcome().error is None
    assert read_rank(stored(root, 2), trainer) == copying.data


def test_what_storage_refuses_is_told_once_it_is_staged(node: Node, root: Path) -> None:
    trainer = node.trainer(root, numel=NUMEL)
    assert trainer.save(1).error is None
    obstacle = root / names.iteration_dir(2)
    obstacle.write_text("in the way")
    copying = Copying(trainer, 2)
    copying.copy(CHUNK_NBYTES)
    log = node.directory(root) / "agent.log"
    eventually("the agent has tried", lambda: "was not persisted" in log.read_text())
    assert trainer.client.poll().pending == 0
    copying.hand_over()
    error = trainer.outcome().error
    assert error is not None
    assert "a file stands where a directory should be" in error
    assert copying.slot.header.state == SlotState.FAILED
    obstacle.unlink()
    assert trainer.save(3).error is None


def test_a_shard_that_is_begun_is_no_leftover(node: Node, root: Path) -> None:
    trainer = node.trainer(root, numel=NUMEL)
    assert trainer.save(8).error is None
    save_id = new_save_id()
    (leftover,) = plant(root, 5, names.shard_name(0, "aaaaaaaaaaaa"))
    with held_back(shard(trainer, 9, save_id)) as let_go:
        trainer.stage(9, save_id)
        copying = half_written(trainer, 3)  # training went back
        let_go()
        assert trainer.outcome().error is None
    eventually("older ones were looked through", lambda: not leftover.exists())
    copying.hand_over()
    assert trainer.outcome().error is None
    assert read_rank(stored(root, 3), trainer) == copying.data


def test_words_that_make_no_sense_are_not_listened_to(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    trainer.client.copied(0, 5)  # no slab
    trainer.stage(1, new_save_id())
    for slot, nbytes in ((-1, 5), (99, 5), (0, 5), (1, 5), (0, -5)):
        trainer.client.copied(slot, nbytes)  # nothing is being copied
    assert trainer.outcome().error is None
    copying = Copying(trainer, 2)
    copying.slot.set_meta(b"not what it was")
    copying.copy(5)
    assert trainer.client.poll().pending == 0, "the agent still answers"


def test_saying_how_far_the_copies_are_waits_for_nobody(node: Node, root: Path) -> None:
    trainer = node.trainer(root, numel=NUMEL)
    copying = half_written(trainer, 1)
    agent = trainer.client.agent_pid
    suspend(agent)
    asking = threading.Thread(target=trainer.client.poll)
    try:
        for nbytes in range(20_000):  # more words than any queue holds
            trainer.client.copied(copying.slot.index, nbytes)
        asking.start()
        asking.join(0.1)
        trainer.client.copied(copying.slot.index, 2 * CHUNK_NBYTES)
        assert asking.is_alive()
    finally:
        os.kill(agent, signal.SIGCONT)
    asking.join(PATIENCE_S)
    assert not asking.is_alive()
    copying.hand_over()
    assert trainer.outcome().error is None
    assert read_rank(stored(root, 1), trainer) == copying.data


def arrivals(trainer: FakeTrainer) -> tuple[Arrival, Arrival]:
    """Return two that have to take turns."""
    slot = trainer.begin(1, new_save_id())
    assert slot is not None
    turns = Turns(1)
    return Arrival(slot.header, slot.meta, turns), Arrival(slot.header, slot.meta, turns)


def test_whoever_waits_for_a_trainer_lets_others_have_the_turn(node: Node, root: Path) -> None:
    first, second = arrivals(node.trainer(root))
    order: list[str] = []

    def write() -> None:
        with first.turn():
            order.append("begun")
            first.wait(5)
            order.append("ended")

    writing = threading.Thread(target=write)
    with second.turn():
        writing.start()
        writing.join(0.1)
        assert order == []
    eventually("it has its turn", lambda: order == ["begun"])
    with second.turn():
        first.reach(5)
        writing.join(0.1)
        assert order == ["begun"], "not both at a time"
    writing.join(PATIENCE_S)
    assert order == ["begun", "ended"]


@pytest.mark.parametrize("begun", [True, False])
def test_what_is_withdrawn_waits_for_no_turn(node: Node, root: Path, begun: bool) -> None:
    first, second = arrivals(node.trainer(root))
    stopped: list[Exception] = []

    def write() -> None:
        try:
            with first.turn():
                first.wait(5)
        except WithdrawnError as error:
            stopped.append(error)

    writing = threading.Thread(target=write)
    if begun:
        writing.start()
        eventually("it waits", lambda: first._turns.free == 1 and writing.is_alive())
    with second.turn():
        if not begun:
            writing.start()
        first.withdraw()
        writing.join(PATIENCE_S)
        assert not writing.is_alive()
    assert len(stopped) == 1
    with second.turn():
        pass


def test_a_header_that_is_changed_meanwhile_is_taken_as_it_was_or_not_at_all(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer may come to its doorbell before the agent reads its first word of the copies."""
    where = AgentNode(AgentOptions(str(root), 60, 1, 1, None, 0, "auto", 60, 60, 60, False))
    saves = Saves(where, Committer(where))
    slots = RankSlots(Slab.create(1, 100, 100, "0"))
    where.ranks[0] = Trainer()
    where.ranks[0].slots = slots
    staging = SlotHeader(SlotState.STAGING, 5, new_save_id(), 50, 100)
    staged = msgspec.structs.replace(staging, state=SlotState.STAGED)
    begun: list[SlotHeader] = []
    monkeypatch.setattr(saves, "_begin", lambda *given: begun.append(given[3]))
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            slots.slab.slots[0].set_header(staged)
            slots.slab.slots[0].set_header(staging)

    changing = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    changing.start()
    try:
        for _ in range(2000):
            saves.copied(0, Copied(0, 5))
    finally:
        stop.set()
        changing.join()
        sys.setswitchinterval(interval)
        saves.close()
        slots.slab.close()
    assert begun
    assert set(begun) == {staging}
