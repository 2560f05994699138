"""A shard has its name once it is whole, and is never written again."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from megatron_flashckpt.agent.janitor import CommittedSave, Janitor
from megatron_flashckpt.agent.shard_writer import DurableShard, slot_shard
from megatron_flashckpt.catalog.lineage import History
from megatron_flashckpt.config import Retention
from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import CorruptCheckpointError, StorageError
from megatron_flashckpt.file_format.file_names import (
    iteration_dir,
    run_name,
    save_name,
    shard_name,
)
from megatron_flashckpt.memory.slot import Slot
from megatron_flashckpt.storage.posix_files import PART, temporary_name
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.store import Store
from tests.support.memory_store import MemoryStore
from tests.support.trainer import staged_slot

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
        assert written(store, slot) == first
        assert store.get(name_of(slot)) == before


@STORES
@pytest.mark.parametrize("other", [b"", b"not ours", b"\xff" * 5000])
def test_another_file_with_the_name_is_refused_and_stays(
    tmp_path: Path, in_memory: bool, other: bytes
) -> None:
    store = store_in(tmp_path, in_memory=in_memory)
    with staged_slot(1000) as slot:
        store.create(name_of(slot), other)
        with pytest.raises(CorruptCheckpointError, match="is another file; move it away"):
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
        assert written(store, slot) == first


def test_unfinished_shards_go_when_nobody_needs_them(tmp_path: Path) -> None:
    """Shards of dead saves may have no other name. Those of later runs are being written."""
    store = PosixStore(tmp_path)
    runs = {number: run_name(number, f"{number:04x}") for number in (1, 2, 3)}
    saves = {number: save_name(run, 5, 1) for number, run in runs.items()}
    directory = tmp_path / iteration_dir(5)
    store.create(f"{iteration_dir(5)}/{shard_name(0, saves[2])}", b"pending")
    for save_id in saves.values():
        (directory / temporary_name(shard_name(1, save_id), PART)).write_bytes(b"half")
    (tmp_path / iteration_dir(4)).mkdir()
    only = tmp_path / iteration_dir(4) / temporary_name(shard_name(0, saves[1]), PART)
    only.write_bytes(b"half")
    janitor = Janitor(lambda: {saves[2]}, deadline_s=0.0)
    janitor.tidy(
        CommittedSave(
            store=store,
            iteration=7,
            save_id=save_name(runs[2], 7, 1),
            history=History(runs[2]),
            rules=Retention(),
            retain_interval=None,
            previous=None,
        )
    )
    left = {path.name.split(".rank_")[0].lstrip(".") for path in directory.glob(".*")}
    assert left == {saves[2], saves[3]}
    assert not only.exists()
