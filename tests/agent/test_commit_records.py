"""Reads of the commit records of all ranks: one by one, or several at a time."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from megatron_flashckpt.agent.proposals import read_records
from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import (
    KNOWN_ITEMS,
    CommitRecord,
    Coordinates,
    decode_records,
    encode_items,
    encode_records,
)
from megatron_flashckpt.file_format.file_names import save_name
from megatron_flashckpt.layout.save_cost import RankCost
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.checkpoints import RUN, SAVE_ID

RANKS = 64


class _SlowStore(PosixStore):
    """Answers a read after `wait_s`; records which threads read, and how many at a time."""

    def __init__(self, root: Path, wait_s: float) -> None:
        super().__init__(root)
        self.wait_s = wait_s
        self.readers: set[int] = set()
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def get(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        with self._lock:
            self.readers.add(threading.get_ident())
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(self.wait_s)
        data = super().get(name, offset, nbytes)
        with self._lock:
            self._now -= 1
        return data


def record_of_rank(rank: int) -> str:
    return file_names.record_name(range(rank, rank + 1), SAVE_ID)


def record_of(rank: int, **fields: object) -> CommitRecord:
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
    return msgspec.structs.replace(record, **fields)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    directory = tmp_path / file_names.iteration_dir(1)
    directory.mkdir()
    for rank in range(RANKS):
        record = record_of(rank)
        (directory / record_of_rank(rank)).write_bytes(encode_records([record]))
    return tmp_path


def names(root: Path) -> list[str]:
    return os.listdir(root / file_names.iteration_dir(1))


@pytest.mark.parametrize("wait_s", [0.0, 0.02])
def test_records_are_read_in_rank_order_and_each_template_once(
    records: Path, wait_s: float
) -> None:
    merged = read_records(_SlowStore(records, wait_s), 1, SAVE_ID, RANKS, names(records))
    assert [record.rank for record in merged] == list(range(RANKS))
    assert [record.placement for record in merged] == [(rank,) for rank in range(RANKS)]
    whole = [entry.template_fingerprint for entry in merged if entry.template is not KNOWN_ITEMS]
    assert sorted(whole) == ["t0", "t1"]


def test_records_on_slow_storage_are_read_by_several_threads(records: Path) -> None:
    distant = _SlowStore(records, 0.02)
    read_records(distant, 1, SAVE_ID, RANKS, names(records))
    assert distant.most > 4


OTHER = save_name(RUN, 2)


def _nested(body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body) + body


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (b"\xc1 not msgpack", "is not a commit record"),
        (b"", "is not a commit record"),
        (_nested(b"\x91" * 100_000), "is not a commit record"),
        (encode_records([record_of(1)])[:-1] + b"\0", "its digest does not match"),
        (encode_records([record_of(0)]), f"(1, '{SAVE_ID}', 0"),
        (encode_records([record_of(1, save_id=OTHER)]), f"(1, '{OTHER}', 1"),
        (encode_records([record_of(1, iteration=99)]), f"(99, '{SAVE_ID}', 1"),
        (encode_records([record_of(1, file="../../up")]), "'../../up'), expected (1"),
    ],
    ids=["garbage", "empty", "nested", "flipped", "doubled", "save", "iteration", "elsewhere"],
)
def test_a_record_with_wrong_contents_is_refused(
    records: Path, planted: bytes, message: str
) -> None:
    name = file_names.record_name(range(1, 2), SAVE_ID)
    (records / file_names.iteration_dir(1) / name).write_bytes(planted)
    with pytest.raises(CorruptCheckpointError, match=re.escape(message)):
        decoded(records)


# ---------------------------------------------------------------------- records of several ranks


def write(root: Path, records: list[CommitRecord]) -> Path:
    """Write one record file for consecutive ranks."""
    ranks = range(records[0].rank, records[0].rank + len(records))
    name = file_names.record_name(ranks, SAVE_ID)
    path = root / file_names.iteration_dir(1) / name
    path.write_bytes(encode_records(records))
    return path


def decoded(root: Path) -> list[CommitRecord]:
    return read_records(PosixStore(root), 1, SAVE_ID, RANKS, names(root))


@pytest.fixture
def of_nodes(records: Path) -> Path:
    """The same records, in one file for each node of eight ranks."""
    single = decoded(records)
    for name in names(records):
        (records / file_names.iteration_dir(1) / name).unlink()
    items = encode_items(())
    whole = [msgspec.structs.replace(record, template=items) for record in single]
    for first in range(0, RANKS, 8):
        write(records, whole[first : first + 8])
    return records


def test_node_records_equal_the_records_of_their_ranks(
    of_nodes: Path,
) -> None:
    assert len(names(of_nodes)) == RANKS // 8
    merged = decoded(of_nodes)
    assert [record.rank for record in merged] == list(range(RANKS))
    assert [record.placement for record in merged] == [(rank,) for rank in range(RANKS)]
    whole = [entry.template_fingerprint for entry in merged if entry.template is not KNOWN_ITEMS]
    assert sorted(whole) == ["t0", "t1"]


def test_a_file_has_each_template_once(of_nodes: Path) -> None:
    path = of_nodes / file_names.iteration_dir(1) / file_names.record_name(range(8), SAVE_ID)
    merged = decode_records(path.read_bytes(), "it")
    assert [record.template is KNOWN_ITEMS for record in merged] == [False, False] + 6 * [True]


def test_a_rank_may_have_two_records_that_agree(of_nodes: Path) -> None:
    """The agent was killed after the first put, and the name of that file became visible late."""
    record = decoded(of_nodes)[3]
    cost = RankCost(started_at=1.0, blocked_s=2.0, staged_s=3.0)
    items = encode_items(())
    for other in (record, msgspec.structs.replace(record, cost=cost)):
        write(of_nodes, [msgspec.structs.replace(other, template=items)])
        merged = decoded(of_nodes)
        assert [record.rank for record in merged] == list(range(RANKS))
        assert {
            entry.template_fingerprint for entry in merged if entry.template is not KNOWN_ITEMS
        } == {
            "t0",
            "t1",
        }


@pytest.mark.parametrize("field", ["nbytes", "header_digest", "placement"])
def test_contradictory_records_of_a_rank_are_refused(of_nodes: Path, field: str) -> None:
    record = decoded(of_nodes)[3]
    value = {"nbytes": 2, "header_digest": "f", "placement": (99,)}[field]
    write(of_nodes, [msgspec.structs.replace(record, **{field: value})])
    with pytest.raises(CorruptCheckpointError, match="two commit records of rank 3 contradict"):
        decoded(of_nodes)


@pytest.mark.parametrize("kept", [[], [0, 1], [0, 2], [1, 0], [0, 0, 1], [0, 1, 2, 3]])
def test_a_record_file_whose_ranks_differ_from_its_name_is_refused(
    of_nodes: Path, kept: list[int]
) -> None:
    """The digest of the file is right."""
    whole = decoded(of_nodes)[:8]
    path = of_nodes / file_names.iteration_dir(1) / file_names.record_name(range(3), SAVE_ID)
    path.write_bytes(encode_records([whole[i] for i in kept]))
    with pytest.raises(CorruptCheckpointError, match=f"{path.name}: is the record of"):
        decoded(of_nodes)


def test_no_template_is_lost_in_any_order_of_reads(
    of_nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads read the records; the items of the first read are kept."""

    def backwards(read: Callable[[Any], Any], files: Sequence[Any]) -> list[Any]:
        return [read(file) for file in reversed(files)][::-1]

    whole = [
        msgspec.structs.replace(
            record, template=encode_items(()), template_fingerprint=f"own {record.rank}"
        )
        for record in decoded(of_nodes)[:8]
    ]
    write(of_nodes, whole)
    write(of_nodes, whole[3:4])
    monkeypatch.setattr("megatron_flashckpt.agent.proposals.for_all", backwards)
    own = [record for record in decoded(of_nodes) if record.template_fingerprint.startswith("own")]
    assert [record.template is KNOWN_ITEMS for record in own] == [False] * 8
