"""How the committing agent reads the records of all ranks: one by one, or several at a time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from megatron_flashckpt.agent.commit_records import read_records
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import (
    KNOWN_ITEMS,
    CommitRecord,
    Coordinates,
    encode_items,
    encode_record,
)
from megatron_flashckpt.storage.posix import PosixStorage

RANKS = 64
SAVE_ID = "a" * 12


class _Distant(PosixStorage):
    """Answers a read after `wait_s`, and notes which threads read, and how many at a time."""

    def __init__(self, root: Path, wait_s: float) -> None:
        super().__init__(root)
        self.wait_s = wait_s
        self.readers: set[int] = set()
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        with self._lock:
            self.readers.add(threading.get_ident())
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(self.wait_s)
        found = super().read(name, offset, nbytes)
        with self._lock:
            self._now -= 1
        return found


@pytest.fixture
def records(tmp_path: Path) -> Path:
    directory = tmp_path / file_names.iteration_dir(1)
    directory.mkdir()
    for rank in range(RANKS):
        record = CommitRecord(
            iteration=1,
            save_id=SAVE_ID,
            rank=rank,
            coordinates=Coordinates(dp=rank),
            file=file_names.shard_name(rank, SAVE_ID),
            nbytes=1,
            header_digest="",
            template_fingerprint=f"t{rank % 2}",
            template=encode_items(()),
            template_nbytes=0,
            placement=(rank,),
        )
        (directory / file_names.record_name(rank, SAVE_ID)).write_bytes(encode_record(record))
    return tmp_path


@pytest.mark.parametrize("wait_s", [0.0, 0.02])
def test_all_records_come_in_the_order_of_ranks_and_each_template_once(
    records: Path, wait_s: float
) -> None:
    found = read_records(_Distant(records, wait_s), 1, SAVE_ID, RANKS)
    assert [record.rank for record in found] == list(range(RANKS))
    assert [record.placement for record in found] == [(rank,) for rank in range(RANKS)]
    whole = [it.template_fingerprint for it in found if it.template is not KNOWN_ITEMS]
    assert sorted(whole) == ["t0", "t1"]


def test_storage_that_takes_its_time_is_asked_for_several_records_at_once(records: Path) -> None:
    distant = _Distant(records, 0.02)
    read_records(distant, 1, SAVE_ID, RANKS)
    assert distant.most > 4


def test_storage_that_answers_at_once_is_read_by_one_thread(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever this machine is busy with, it counts as at once.
    monkeypatch.setattr("megatron_flashckpt.storage.parallel._AT_ONCE_S", 60.0)
    near = _Distant(records, 0.0)
    read_records(near, 1, SAVE_ID, RANKS)
    assert near.readers == {threading.get_ident()}


@pytest.mark.parametrize("wait_s", [0.0, 0.02])
@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_a_damaged_record_is_named(records: Path, wait_s: float, rank: int) -> None:
    path = records / file_names.iteration_dir(1) / file_names.record_name(rank, SAVE_ID)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=path.name):
        read_records(_Distant(records, wait_s), 1, SAVE_ID, RANKS)
