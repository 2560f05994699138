"""A shard has its name once it is whole, and is never written again."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest

from megatron_flashckpt.agent import shard_writer
from megatron_flashckpt.agent.copy_files import copied
from megatron_flashckpt.agent.janitor import Janitor
from megatron_flashckpt.agent.shard_writer import DurableShard, slot_shard
from megatron_flashckpt.agent.write_limits import Flow
from megatron_flashckpt.catalog.lineage import History, Save
from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import CorruptCheckpointError, StorageError
from megatron_flashckpt.file_format.end import Failure, encode_failure
from megatron_flashckpt.file_format.file_names import (
    end_name,
    iteration_dir,
    run_name,
    save_name,
    shard_name,
)
from megatron_flashckpt.layout.template import PlanCache
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import Slot, SlotState
from megatron_flashckpt.storage import posix_writer
from megatron_flashckpt.storage.posix_files import PART, temporary_name
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Store
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.histories import committed_save
from tests.support.memory_store import MemoryStore
from tests.support.trainer import (
    eventually,
    new_save_id,
    pieces_of,
    staged_slot,
    write_slot,
)

STORES = pytest.mark.parametrize("in_memory", [False, True])


def store_in(root: Path, *, in_memory: bool) -> Store:
    return MemoryStore() if in_memory else PosixStore(root)


def written(store: Store, slot: Slot) -> DurableShard:
    return slot_shard(store, slot, slot.header, slot.meta)


def name_of(slot: Slot) -> str:
    header = slot.header
    return f"{iteration_dir(header.iteration)}/{shard_name(slot.meta.rank, header.save_id)}"


@STORES
def test_a_shard_that_storage_has_is_taken_as_it_is(tmp_path: Path, in_memory: bool) -> None:
    """A former agent has written it, and the bytes in memory have changed since."""
    store = store_in(tmp_path, in_memory=in_memory)
    with staged_slot(1000) as slot:
        first = written(store, slot)
        before = store.get(name_of(slot))
        with slot.data() as data:
            data[0] ^= 1
        assert written(store, slot) == first._replace(is_found=True)
        assert store.get(name_of(slot)) == before


@STORES
@pytest.mark.parametrize("other", [b"", b"not ours", b"\xff" * 5000])
def test_another_file_with_the_name_is_refused_and_stays(
    tmp_path: Path, in_memory: bool, other: bytes
) -> None:
    store = store_in(tmp_path, in_memory=in_memory)
    with staged_slot(1000) as slot:
        store.create(name_of(slot), other)
        with pytest.raises(CorruptCheckpointError, match="but is another file"):
            written(store, slot)
        assert store.get(name_of(slot)) == other


@STORES
def test_a_name_that_is_seen_late_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    store = store_in(tmp_path, in_memory=in_memory)

    def not_yet(*_: object) -> bytes:
        raise FileNotFoundError(errno.ENOENT, "does not exist")

    with staged_slot(1000) as slot:
        first = written(store, slot)
        with monkeypatch.context() as patched:
            patched.setattr(store, "get", not_yet)
            with pytest.raises(StorageError) as caught:
                written(store, slot)
        assert may_pass(caught.value)
        assert written(store, slot).digests == first.digests


def test_a_writer_that_was_taken_for_dead_takes_the_shard_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, successors = PosixStore(tmp_path), list[DurableShard]()

    def succeed(point: str) -> None:
        if point == "persist.header" and not successors:
            monkeypatch.undo()
            store.discard_unfinished(iteration_dir(slot.header.iteration), lambda name: True)
            successors.append(written(store, slot))

    with staged_slot(1000) as slot:
        monkeypatch.setattr(shard_writer, "hit", succeed)
        with pytest.raises(StorageError, match="was removed; write it again") as caught:
            written(store, slot)
        assert may_pass(caught.value)
        assert written(store, slot) == successors[0]._replace(is_found=True)


def test_a_shard_that_gets_its_name_after_the_save_has_failed_goes(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the last call is lost, so the attempt has failed."""
    named = posix_writer.name_whole_file

    def late(temporary: Path, path: Path) -> None:
        trainer.call_off(5, save_id, "another reason")
        eventually("the end is known", lambda: not trainer.client.poll(0.2).pending)
        named(temporary, path)
        assert path.exists()
        raise OSError(errno.EIO, "the answer was lost")

    with agent_here(node, root):
        trainer = node.trainer(root)
        trainer.open_run()
        save_id = trainer.new_save_id()
        with monkeypatch.context() as patched:
            patched.setattr(posix_writer, "name_whole_file", late)
            trainer.stage(5, save_id)
            directory = root / iteration_dir(5)
            eventually("the failed end", lambda: (directory / end_name(save_id)).exists())
            eventually(
                "no shard", lambda: {path.suffix for path in directory.iterdir()} == {".end"}
            )


def test_a_copy_is_not_made_of_a_shard_that_was_left_without_its_description(
    tmp_path: Path,
) -> None:
    """A slot for memory only may have been overwritten while that shard was written."""
    store, layout = PosixStore(tmp_path), PlanCache().layout(pieces_of(0, 1, "weight", 1000))
    with contextlib.closing(Slab.create(1, 16384, layout.nbytes, "0")) as slab:
        slot = write_slot(slab.slots[0], layout, 1, new_save_id(), SlotState.KEPT)
        written(store, slot)
        with slot.data() as data:
            data[0] ^= 1
            right = bytes(data)
        copied(store, 0, slab, 0, slot.header, slot.meta, Flow(1), lambda: None)
        assert store.get(name_of(slot)).endswith(right)


def in_run(number: int, iteration: int) -> Save:
    return Save(iteration, save_name(run_name(number, f"{number:04x}"), iteration))


def put_part(store: PosixStore, root: Path, save: Save) -> Path:
    """Leave an unfinished shard, as a killed agent does."""
    path = root / iteration_dir(save.iteration) / temporary_name(shard_name(1, save.save_id), PART)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    return path


def test_unfinished_shards_go_when_nobody_needs_them(tmp_path: Path) -> None:
    """Shards of dead saves may have no other name. Those of later runs are being written."""
    store, pending = PosixStore(tmp_path), {in_run(2, 5).save_id, in_run(2, 4).save_id}
    store.create(f"{iteration_dir(5)}/{shard_name(0, in_run(2, 5).save_id)}", b"pending")
    parts = {
        (number, iteration): put_part(store, tmp_path, in_run(number, iteration))
        for number, iteration in ((1, 3), (2, 4), (1, 5), (2, 5), (3, 5))
    }
    last = in_run(2, 7)
    store.create(f"{iteration_dir(7)}/{end_name(last.save_id)}", encode_failure(Failure(failed="")))
    janitor = Janitor(lambda: pending)
    janitor.tidy(committed_save(store, last, History(last.run)))
    assert {key for key, path in parts.items() if path.exists()} == {(2, 4), (2, 5), (3, 5)}
    pending.clear()  # these saves have failed; the directory of one had no other name
    janitor.tidy(committed_save(store, last, History(last.run)))
    assert {key for key, path in parts.items() if path.exists()} == {(3, 5)}
