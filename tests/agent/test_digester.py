"""Digests of slots in memory: nothing waits for them, and the ranks of a node share the threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.agent import digester as digester_module
from megatron_flashckpt.agent.committer import Committer
from megatron_flashckpt.agent.durable_commands import DurableCommands
from megatron_flashckpt.agent.freeing import free
from megatron_flashckpt.agent.janitor import Janitor
from megatron_flashckpt.agent.node import AgentOptions, Trainer
from megatron_flashckpt.agent.node import Node as AgentNode
from megatron_flashckpt.agent.rank_slots import RankSlots
from megatron_flashckpt.agent.saves import Saves
from megatron_flashckpt.agent.settings import settings_of
from megatron_flashckpt.config import Config
from megatron_flashckpt.file_format.shard_file import chunk_digest
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlotHeader, SlotState
from tests.agent.conftest import Node
from tests.support.trainer import PATIENCE_S, eventually, new_save_id

#: Chunks of a slot in these tests: several turns for each of up to four threads.
CHUNKS = 80
#: Small chunks, so that the tests need little memory.
CHUNK_NBYTES = 4096
NBYTES = CHUNKS * CHUNK_NBYTES


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digester_module, "CHUNK_NBYTES", CHUNK_NBYTES)
    monkeypatch.setattr(digester_module, "chunk_count", lambda nbytes: -(-nbytes // CHUNK_NBYTES))


class Gate:
    """Stands in for `chunk_digest`: notes the first byte of each chunk, and may stop there."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.opened = threading.Event()
        self.opened.set()
        self.at_once = 0
        self.most = 0
        self._lock = threading.Lock()

    def __call__(self, chunk: memoryview) -> str:
        with self._lock:
            self.seen.append(chunk[0])
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        assert self.opened.wait(PATIENCE_S)
        with self._lock:
            self.at_once -= 1
        return f"{chunk[0]:016x}"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(digester_module, "chunk_digest", made)
    yield made
    made.opened.set()


class Ranks:
    """The slots of ranks whose agent has no connections: the test is the only other thread."""

    def __init__(self, root: Path, ranks: int, cpus: int) -> None:
        options = AgentOptions(root=str(root), **msgspec.structs.asdict(settings_of(Config())))
        self.node = AgentNode(options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
            committer = Committer(self.node, Janitor(), DurableCommands(self.node))
            self.saves = Saves(self.node, committer)
        self.digester = self.saves.digester
        self.trainers = [Trainer() for _ in range(ranks)]
        for number, trainer in enumerate(self.trainers):
            trainer.slots = RankSlots(Slab.create(2, 0, NBYTES, str(number), huge_pages=False))
            self.node.ranks[number] = trainer

    def keep(self, number: int, iteration: int, mark: int = 0) -> int:
        """Make a complete memory-only slot whose chunks begin with `mark`; return its index."""
        slots = self.slots(number)
        with self.node.changed:
            index = slots.acquire()
            assert index >= 0, "a memory-only save waits for nothing"
            slot = slots.slab.slots[index]
            slot.set_header(SlotHeader(SlotState.KEPT, iteration, new_save_id(), 0, NBYTES))
            with slot.data() as data:
                for start in range(0, NBYTES, CHUNK_NBYTES):
                    data[start] = mark
            self.saves.accept_slot(number, index)
        return index

    def slots(self, number: int) -> RankSlots:
        return self.trainers[number].slots

    def digest(self, number: int) -> None:
        with self.node.changed:
            self.digester.digest(self.trainers[number])

    def digests(self, number: int, index: int) -> tuple[str, ...]:
        """Return the digests of a slot, when all that are under way have ended."""
        slots = self.slots(number)
        with self.node.changed:
            assert self.node.changed.wait_for(lambda: not slots.awaits_digests, PATIENCE_S)
            return slots.infos[index].digests or ()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[[int, int], Ranks]]:
    made: list[Ranks] = []

    def make(number: int, cpus: int) -> Ranks:
        made.append(Ranks(tmp_path, number, cpus))
        return made[-1]

    yield make
    for each in made:
        each.saves.close()
        each.node.give_up_slots()


Make = Callable[[int, int], Ranks]


@pytest.mark.parametrize("state", [SlotState.KEPT, SlotState.FAILED])
def test_digests_of_several_threads_are_those_of_the_chunks_in_order(
    ranks: Make, state: SlotState
) -> None:
    """A write that failed may have digested nothing."""
    job = ranks(1, 8)
    index = job.keep(0, 1)
    slots = job.slots(0)
    slots.slab.slots[index].set_state(state)
    with slots.slab.slots[index].data() as data:
        for number in range(CHUNKS):
            data[number * CHUNK_NBYTES] = number + 1
        expected = tuple(
            chunk_digest(data[start : start + CHUNK_NBYTES])
            for start in range(0, NBYTES, CHUNK_NBYTES)
        )
    job.digest(0)
    assert job.digests(0, index) == expected
    assert len(set(expected)) == CHUNKS


@pytest.mark.parametrize(
    ("cpus", "trains", "threads"),
    [(1, False, 1), (2, False, 1), (8, False, 4), (96, False, 8), (96, True, 3)],
)
def test_all_ranks_share_half_of_the_cpus_and_eight_threads_at_most(
    ranks: Make,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    cpus: int,
    trains: bool,
    threads: int,
) -> None:
    """Beside training, one thread digests a rank."""
    monkeypatch.setattr(digester_module, "_SETTLED_S", 0.0)
    gate.opened.clear()
    job = ranks(3, cpus)
    indices = [job.keep(number, 1) for number in range(3)]
    if trains:
        time.sleep(0.01)
        job.digester.digest_settled()
    else:
        for number in range(3):
            job.digest(number)
    eventually("all threads digest", lambda: gate.at_once == threads)
    gate.opened.set()
    for number in range(3):
        assert len(job.digests(number, indices[number])) == CHUNKS
    assert gate.most == threads


def test_slots_of_different_ranks_take_turns(ranks: Make, gate: Gate) -> None:
    """With one thread per node and no turns, the last of eight ranks waited for all others."""
    job = ranks(3, 1)
    gate.opened.clear()
    indices = [job.keep(number, 1, mark=number + 1) for number in range(3)]
    for number in range(3):
        job.digest(number)
    gate.opened.set()
    for number in range(3):
        assert job.digests(number, indices[number]) == (f"{number + 1:016x}",) * CHUNKS
    firsts = [gate.seen.index(mark) for mark in (1, 2, 3)]
    assert max(firsts) < CHUNKS / 2, "each slot is begun long before another one has ended"
    assert len(gate.seen) == 3 * CHUNKS


def test_a_save_that_overwrites_a_slot_ends_its_digesting(ranks: Make, gate: Gate) -> None:
    job = ranks(1, 8)
    gate.opened.clear()
    first = job.keep(0, 1, mark=1)
    job.digest(0)
    eventually("a digest has begun", lambda: gate.seen)
    job.keep(0, 2, mark=2)
    assert job.keep(0, 3, mark=3) == first, "the slot is reused although it is being digested"
    gate.opened.set()
    job.digest(0)
    assert job.digests(0, first) == (f"{3:016x}",) * CHUNKS
    assert job.digests(0, 1 - first) == (f"{2:016x}",) * CHUNKS
    assert len(gate.seen) <= 2 * CHUNKS + 4, "of the first save at most a chunk per thread"


def test_a_slab_is_freed_while_its_slots_are_digested_and_nobody_waits(
    ranks: Make, gate: Gate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing many pages takes seconds, in which the agent must answer all ranks."""
    may_close, close = threading.Event(), Slab.close

    def slow_close(slab: Slab) -> None:
        assert may_close.wait(PATIENCE_S)
        close(slab)

    monkeypatch.setattr(Slab, "close", slow_close)
    job = ranks(2, 4)
    gate.opened.clear()
    job.keep(0, 1, mark=1)
    kept = job.keep(1, 1, mark=2)
    job.digest(0)
    eventually("a digest has begun", lambda: gate.seen)
    with job.node.changed:
        slots = job.slots(0)
        job.node.retire_slots(job.trainers[0])
        job.node.drop_retired(job.trainers[0])
        assert not job.trainers[0].retired, "the memory is given up without a wait"
        assert slots.slab.fd >= 0
    may_close.set()
    eventually("the slab is closed", lambda: slots.slab.fd < 0)
    gate.opened.set()
    job.digest(1)
    assert job.digests(1, kept) == (f"{2:016x}",) * CHUNKS
    assert gate.seen.count(1) <= 4
    assert caplog.messages == []


def test_memory_is_freed_at_once_if_the_process_has_no_thread_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, the agent ended, with the memory of all ranks."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    slab = Slab.create(1, 0, 4096, "0")
    free(slab)
    assert slab.fd < 0


def test_only_slots_that_have_settled_are_digested_during_training(
    ranks: Make, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ranks(1, 4)
    slots = job.slots(0)
    for iteration in range(1, 6):
        newest = job.keep(0, iteration)
        job.digester.digest_settled()
        assert not slots.awaits_digests, "a save after every step costs no digests"
    monkeypatch.setattr(digester_module, "_SETTLED_S", 0.0)
    slots.infos[1 - newest].persisting = True
    job.digester.digest_settled()
    assert len(job.digests(0, newest)) == CHUNKS
    assert slots.infos[1 - newest].digests is None, "the threads that write a slot digest it"
    job.digester.digest_settled()
    assert not slots.awaits_digests, "once is enough"


def test_digests_of_a_slot_are_not_replaced(ranks: Make, gate: Gate) -> None:
    """The first ones count, also if storage has them while the memory is digested."""
    gate.opened.clear()
    job = ranks(1, 4)
    index = job.keep(0, 1)
    job.digest(0)
    slots = job.slots(0)
    slots.infos[index].digests = ("those of the written chunks",)
    gate.opened.set()
    for _ in range(2):
        assert job.digests(0, index) == ("those of the written chunks",)
        job.digest(0)
        assert not slots.awaits_digests


def test_a_slot_that_cannot_be_digested_is_reported_once_and_stays(
    ranks: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(chunk: memoryview) -> str:
        raise MemoryError

    monkeypatch.setattr(digester_module, "chunk_digest", fail)
    monkeypatch.setattr(digester_module, "_SETTLED_S", 0.0)
    job = ranks(1, 8)
    index = job.keep(0, 7)
    for _ in range(3):
        job.digester.digest_settled()
        assert job.digests(0, index) == ()
    (notice,) = job.trainers[0].notices
    assert (notice.iteration, notice.text) == (
        7,
        "not digested in host memory: MemoryError: ; the slot is kept",
    )
    assert f"iteration 7: {notice.text}" in caplog.text
    (outcome,) = job.trainers[0].unreported
    assert (outcome.error, outcome.kept) == (None, True)
    monkeypatch.setattr(digester_module, "chunk_digest", chunk_digest)
    job.digest(0)  # the trainer disconnects
    assert len(job.digests(0, index)) == CHUNKS


def test_a_result_that_was_not_reported_comes_after_a_reconnect(node: Node, root: Path) -> None:
    """Before, the trainer looked for a kept save in storage, and called it failed."""
    trainer = node.trainer(root)
    save_id = new_save_id()
    trainer.stage(3, save_id, state=SlotState.KEPT)
    assert trainer.take()[0].digests is not None
    agent = trainer.client.agent_pid
    assert save_id in trainer.reconnect()
    assert trainer.client.agent_pid == agent
    outcome = trainer.outcome()
    assert (outcome.save_id, outcome.error, outcome.kept) == (save_id, None, True)
