"""Copies on a node's own disk: made first, whole or absent, and given to a rank without memory."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_flashckpt.agent import copy_files, local_copies
from megatron_flashckpt.agent.local_copies import LocalCopies
from megatron_flashckpt.agent.recovery import filled
from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.config import Config, LocalTier
from megatron_flashckpt.file_format.file_names import TRACKER, iteration_dir, shard_name
from megatron_flashckpt.file_format.shard_file import chunk_digest
from megatron_flashckpt.layout.template import PlanCache
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import Slot, SlotHeader, SlotMeta, SlotState
from megatron_flashckpt.storage.store import Store
from tests.agent.conftest import Node
from tests.support.stored import assert_intact, names_in
from tests.support.trainer import (
    FakeTrainer,
    blocked_open,
    blocked_shard,
    content,
    eventually,
    is_alive,
    kill_agent,
    new_save_id,
    pieces_of,
    run_after,
    write_slot,
)

LAYOUT = PlanCache().layout(pieces_of(0, 1, "decoder.weight", 1000))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "nvme").mkdir()
    return tmp_path / "nvme"


@pytest.fixture
def config(node: Node, disk: Path) -> Config:
    return msgspec.structs.replace(node.config(), local_tier=LocalTier(directory=str(disk)))


def copies_on(disk: Path) -> list[tuple[int, int]]:
    """Return iteration and rank of each whole copy."""
    found = [re.search(r"iter_(\d+)/.*\.rank_(\d+)\.slot", str(p)) for p in disk.rglob("*.slot")]
    return sorted((int(match[1]), int(match[2])) for match in found if match)


def lose_memory(trainers: list[FakeTrainer]) -> None:
    """Kill the agent and its trainers, as a reboot does."""
    kill_agent(trainers[0].client.agent_pid)
    for trainer in trainers:
        trainer.hang_up()


def recovered(trainer: FakeTrainer, saves: list[str]) -> dict[int, bytes]:
    """Return what a new process of a rank gets, by iteration."""
    trainer.client.recover(tuple(saves))
    return {offer.iteration: trainer.bytes_in(offer.slot) for offer in trainer.take()}


def test_a_rank_whose_memory_is_lost_gets_its_checkpoints_from_disk(
    node: Node, root: Path, config: Config, disk: Path
) -> None:
    """The newest one was for memory only, the older one was not written to storage yet."""
    trainers = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    stored, kept = new_save_id(), new_save_id()
    with blocked_shard(root, 4, 0, stored) as unblock:
        for trainer in trainers:
            trainer.stage(4, stored)
            trainer.stage(6, kept, state=SlotState.KEPT)
        eventually("the copies", lambda: copies_on(disk) == [(4, 0), (4, 1), (6, 0), (6, 1)])
        lose_memory(trainers)
        unblock()
    assert not any(name.endswith(".end") for name in names_in(root))
    again = [node.trainer(root, rank, 2, config=config) for rank in range(2)]
    assert [trainer.take() for trainer in again] == [(), ()]
    for rank, trainer in enumerate(again):
        nbytes = trainer.layout.nbytes
        assert recovered(trainer, [kept, stored]) == {
            iteration: content(rank, iteration, nbytes) for iteration in (4, 6)
        }
    # The save that the job resumes from is written and committed, as from memory.
    for trainer in again:
        trainer.join(run_after(stored, 4))
    eventually("the commit", (root / TRACKER).exists)
    assert_intact(root, 4, again)


@pytest.mark.parametrize("part", ["safetensors", "slot"])
def test_a_copy_with_a_flipped_bit_is_left_out(
    node: Node, root: Path, config: Config, disk: Path, part: str
) -> None:
    trainer = node.trainer(root, config=config)
    saves = [new_save_id(), new_save_id()]
    for iteration, save_id in zip((5, 6), saves, strict=True):
        trainer.keep(iteration, save_id)
    eventually("the copies", lambda: copies_on(disk) == [(5, 0), (6, 0)])
    lose_memory([trainer])
    (damaged,) = disk.rglob(f"iter_0000006/*.{part}")
    flipped = bytearray(damaged.read_bytes())
    flipped[-9] ^= 16
    damaged.write_bytes(flipped)
    again = node.trainer(root, config=config)
    assert recovered(again, saves) == {5: content(0, 5, again.layout.nbytes)}
    said = {"safetensors": "iteration 6 not recovered from", "slot": "a local copy is not used:"}
    assert f"rank 0: {said[part]} {damaged.parents[1]}" in node.log(root).read_text()


def test_a_node_keeps_the_newest_copies_of_the_history(
    node: Node, root: Path, config: Config, disk: Path
) -> None:
    tier = msgspec.structs.replace(config.local_tier, keep=3)
    config = msgspec.structs.replace(config, local_tier=tier)
    trainer = node.trainer(root, config=config)
    # A rank that runs on another node now.
    departed = node.trainer(root, 1, 2, config=config)
    departed.stage(1, new_save_id(), state=SlotState.KEPT)
    eventually("the copy", lambda: copies_on(disk) == [(1, 1)])
    saves = [new_save_id() for _ in range(4)]
    for iteration, save_id in enumerate(saves, start=2):
        assert trainer.keep(iteration, save_id).kept
        eventually("the copy", lambda iteration=iteration: (iteration, 0) in copies_on(disk))
        if iteration == 3:
            assert (1, 1) in copies_on(disk), "rank 0 may yet complete its copy of iteration 1"
    eventually("the end of old ones", lambda: copies_on(disk) == [(3, 0), (4, 0), (5, 0)])
    lose_memory([trainer, departed])
    # A run that resumes from iteration 4 leaves iteration 5 behind.
    again = node.trainer(root, config=config)
    assert set(recovered(again, saves)) == {4, 5}
    again.join(run_after(saves[2], 4))
    again.keep(6)
    eventually("the end of the dead branch", lambda: copies_on(disk) == [(3, 0), (4, 0), (6, 0)])


@pytest.mark.parametrize("why", ["is not there", "No space left on device"])
def test_a_save_goes_on_without_its_copy(
    request: pytest.FixtureRequest, node: Node, root: Path, disk: Path, why: str
) -> None:
    if why == "is not there":
        disk.rmdir()
        disk.write_text("a file")
    else:
        disk = request.getfixturevalue("small_disk")
    tier = LocalTier(directory=str(disk))
    config = msgspec.structs.replace(node.config(), local_tier=tier)
    trainer = node.trainer(root, config=config, numel=400_000)
    assert trainer.save(3).error is None
    assert_intact(root, 3, [trainer])
    assert re.search(rf"rank 0: no local copy of iteration 3: .*{why}", node.log(root).read_text())
    assert not list(disk.rglob("*.safetensors"))


def test_copies_that_another_user_can_write_are_not_used(
    node: Node, root: Path, config: Config, disk: Path
) -> None:
    trainer, save_id = node.trainer(root, config=config), new_save_id()
    trainer.keep(3, save_id)
    eventually("the copy", lambda: copies_on(disk) == [(3, 0)])
    lose_memory([trainer])
    (place,) = disk.iterdir()
    os.chmod(place, 0o770)
    again = node.trainer(root, config=config)
    assert recovered(again, [save_id]) == {}
    assert f"{place}: another user can write to it" in node.log(root).read_text()


def test_an_agent_killed_before_the_end_of_a_copy_leaves_none(
    node: Node, root: Path, config: Config, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local shard is durable, and nothing says so. The next copies remove it."""
    monkeypatch.setenv("FLASHCKPT_FAULT", "agent:persist.durable:1:KILL")
    trainer, save_id = node.trainer(root, config=config), new_save_id()
    agent = trainer.client.agent_pid
    monkeypatch.delenv("FLASHCKPT_FAULT")
    trainer.stage(3, save_id)
    eventually("the end of the agent", lambda: not is_alive(agent))
    trainer.hang_up()
    assert list(disk.rglob("*.safetensors"))
    again = node.trainer(root, config=config)
    assert recovered(again, [save_id]) == {}
    for iteration in (4, 5, 6):
        assert again.save(iteration).error is None
    left = {path.parent.name for path in disk.rglob("*.safetensors")}
    assert left == {"iter_0000005", "iter_0000006"}


# ---------------------------------------------------------------------- without an agent


def copies_in(disk: Path, root: Path) -> LocalCopies:
    return LocalCopies(str(root), LocalTier(directory=str(disk)))


def put(slab: Slab, iteration: int, save_id: str, state: SlotState) -> Slot:
    """Write a save of rank 0 into a slot."""
    return write_slot(slab.slots[0], LAYOUT, iteration, save_id, state)


def fill(slot: Slot, iteration: int) -> None:
    with slot.data() as data:
        data[:] = content(0, iteration, len(data))


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = Slab.create(2, 16384, LAYOUT.nbytes, "0")
    yield made
    made.close()


def copied(
    copies: LocalCopies,
    slab: Slab,
    header: SlotHeader,
    *,
    rank: int = 0,
    meta: SlotMeta | None = None,
    ranks: tuple[int, ...] = (0,),
    known: tuple[str, ...] | None = None,
) -> tuple[str, ...] | None:
    """Copy the first slot of a slab."""
    more = {"threads": 1, "history": None, "ranks": ranks, "known": lambda: known}
    return copies.keep(rank, slab, 0, header, meta, **more)


def test_a_disk_that_is_not_mounted_gets_no_copies_on_that_of_the_system(
    disk: Path, root: Path, slab: Slab, caplog: pytest.LogCaptureFixture
) -> None:
    slot = put(slab, 3, new_save_id(), SlotState.KEPT)
    disk.rmdir()
    copies = copies_in(disk, root)
    assert copied(copies, slab, slot.header) is None
    assert f"no local copy of iteration 3: {disk}: is not there; mount the disk" in caplog.text
    assert not disk.exists()
    disk.mkdir()
    assert copied(copies, slab, slot.header) is not None


def test_a_slot_that_gets_another_save_makes_no_copy(
    disk: Path, root: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next save is half-copied when the copy begins, and complete when it ends."""
    copies, newer = copies_in(disk, root), new_save_id()
    header = put(slab, 3, new_save_id(), SlotState.KEPT).header
    slot = put(slab, 4, newer, SlotState.STAGING)
    fill(slot, 999)  # what training has copied so far
    shard = copy_files.slot_shard

    def then_complete(*args: Any, **more: Any) -> Any:
        made = shard(*args, **more)
        fill(slot, 4)
        slot.set_state(SlotState.KEPT)
        return made

    monkeypatch.setattr(copy_files, "slot_shard", then_complete)
    assert copied(copies, slab, header) is None
    assert copies.of_rank(0) == {}
    assert not list(disk.rglob("*.safetensors"))
    fill(slot, 4)
    slot.set_state(SlotState.KEPT)
    monkeypatch.undo()
    assert copied(copies, slab, slot.header)
    assert set(copies.of_rank(0)) == {newer}


def test_a_slot_that_changed_after_it_was_digested_makes_no_copy(
    disk: Path, root: Path, slab: Slab, caplog: pytest.LogCaptureFixture
) -> None:
    copies, slot = copies_in(disk, root), put(slab, 3, new_save_id(), SlotState.KEPT)
    with slot.data() as data:
        digests = tuple(chunk_digest(data[at : at + 2**22]) for at in range(0, len(data), 2**22))
        data[5] ^= 1
    assert copied(copies, slab, slot.header, known=digests) is None
    assert "changed after it was digested" in caplog.text
    assert copies.of_rank(0) == {}


def test_no_error_of_a_copy_reaches_the_thread_that_writes_to_storage(
    disk: Path, root: Path, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_threads(*args: Any, **more: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copy_files, "slot_shard", no_threads)
    slot = put(slab, 3, new_save_id(), SlotState.STAGED)
    assert copied(copies_in(disk, root), slab, slot.header) is None
    header = slot.header
    slab.close()
    assert copied(copies_in(disk, root), slab, header) is None


def test_the_newest_save_that_all_ranks_have_outlives_newer_ones_of_one_rank(
    disk: Path, root: Path, slab: Slab
) -> None:
    copies, names = copies_in(disk, root), [new_save_id() for _ in range(5)]

    def keep(rank: int, iteration: int) -> None:
        slot = put(slab, iteration, names[iteration], SlotState.KEPT)
        meta = msgspec.structs.replace(slot.meta, rank=rank)
        assert copied(copies, slab, slot.header, rank=rank, meta=meta, ranks=(0, 1))

    keep(1, 1)
    for iteration in (1, 2, 3):
        keep(0, iteration)
    assert copies_on(disk) == [(1, 0), (1, 1), (2, 0), (3, 0)]
    keep(1, 3)
    keep(0, 4)
    assert copies_on(disk) == [(3, 0), (3, 1), (4, 0)]


def test_another_copy_replaces_a_damaged_one(disk: Path, root: Path, slab: Slab) -> None:
    save_id = new_save_id()
    slot = put(slab, 3, save_id, SlotState.KEPT)
    for name in "ab":
        (disk / name).mkdir()
    whole, damaged = copies_in(disk / "a", root), copies_in(disk / "b", root)
    for copies in (whole, damaged):
        assert copied(copies, slab, slot.header)
    (shard,) = (disk / "b").rglob("*.safetensors")
    os.truncate(shard, shard.stat().st_size - 1)
    first, otherwise = damaged.of_rank(0)[save_id], whole.of_rank(0)[save_id]
    assert filled(0, [first], huge_pages=False) is None
    first = dataclasses.replace(first, otherwise=otherwise)
    slots = filled(0, [first], huge_pages=False)
    assert slots.states(save_id)
    slots.slab.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_copy_that_is_being_made_does_not_outlive_an_orderly_end(
    node: Node, root: Path, config: Config, disk: Path, hangs: bool
) -> None:
    """Its save is for memory only, so it is written to storage at the end.

    A local disk that hangs does not keep the agent.
    """
    trainer, save_id = node.trainer(root, config=config), new_save_id()
    agent = trainer.client.agent_pid
    assert trainer.save(3).error is None
    (place,) = disk.iterdir()
    with blocked_open(place / iteration_dir(4) / shard_name(0, save_id)) as unblock:
        trainer.keep(4, save_id)
        trainer.hang_up(leave=True)
        eventually("the last commit", lambda: (root / TRACKER).read_text() == "4")
        if not hangs:
            time.sleep(0.5)  # the agent is about to end
            assert is_alive(agent)
            unblock()
        eventually("the end of the agent", lambda: not is_alive(agent), 40.0)
    if not hangs:
        assert [path for path in disk.rglob("*") if path.is_file()] == []


def test_a_disk_that_does_not_answer_has_no_copies(
    disk: Path,
    root: Path,
    slab: Slab,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copies, slot = copies_in(disk, root), put(slab, 3, new_save_id(), SlotState.KEPT)
    assert copied(copies, slab, slot.header)
    answers, files = threading.Event(), copy_files.files

    def waiting(store: Store) -> Iterator[tuple[Save, str]]:
        answers.wait(30)
        return files(store)

    monkeypatch.setattr(copy_files, "files", waiting)
    monkeypatch.setattr(local_copies, "_LOOK_S", 0.05)
    assert copies.saves() == set()
    assert copies.of_rank(0) == {}
    assert caplog.text.count("does not answer") == 2
    answers.set()
    monkeypatch.setattr(local_copies, "_LOOK_S", 20.0)
    assert copies.saves() == {(3, slot.header.save_id)}
