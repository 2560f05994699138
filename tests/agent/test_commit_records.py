"""The commit records of all ranks, and their shards: what a node creates, and a commit demands."""

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

from megatron_flashckpt.agent.proposals import (
    MissingShardsError,
    check_shards,
    create_records,
    read_records,
)
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
from tests.support.memory_store import MemoryStore

RANKS = 64


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


def write(root: Path, records: list[CommitRecord]) -> Path:
    """Write one record file for consecutive ranks."""
    ranks = range(records[0].rank, records[0].rank + len(records))
    path = root / file_names.iteration_dir(1) / file_names.record_name(ranks, SAVE_ID)
    path.write_bytes(encode_records(records))
    return path


@pytest.fixture
def records(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The records of all ranks, in files of one rank or of a node of eight."""
    (tmp_path / file_names.iteration_dir(1)).mkdir()
    for first in range(0, RANKS, request.param):
        write(tmp_path, [record_of(first + n) for n in range(request.param)])
    return tmp_path


of_nodes = pytest.mark.parametrize("records", [8], indirect=True)


def decoded(root: Path) -> list[CommitRecord]:
    names = os.listdir(root / file_names.iteration_dir(1))
    return read_records(PosixStore(root), 1, SAVE_ID, RANKS, names)


def whole(records: list[CommitRecord]) -> list[str]:
    """Return the templates of the records that have their items."""
    with_items = [record for record in records if record.template is not KNOWN_ITEMS]
    return sorted(record.template_fingerprint for record in with_items)


@pytest.mark.parametrize(
    ("records", "wait_s"), [(1, 0.0), (1, 0.02), (8, 0.0)], indirect=["records"]
)
def test_records_are_read_in_rank_order_and_each_template_once(
    records: Path, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, readers = PosixStore.get, set[int]()

    def slow(*where: Any) -> bytes:
        readers.add(threading.get_ident())
        time.sleep(wait_s)
        return get(*where)

    monkeypatch.setattr(PosixStore, "get", slow)
    merged = decoded(records)
    assert [(record.rank, record.placement) for record in merged] == [
        (rank, (rank,)) for rank in range(RANKS)
    ]
    assert whole(merged) == ["t0", "t1"]
    assert len(readers) > 4 or not wait_s, "slow storage is read by several threads"


def test_a_node_creates_one_file_for_its_contiguous_ranks_with_each_template_once() -> None:
    store = MemoryStore()
    create_records(store, [record_of(rank) for rank in (0, 4, 3, 2)])
    runs = (range(1), range(2, 5))
    directory = file_names.iteration_dir(1)
    names = [f"{directory}/{file_names.record_name(ranks, SAVE_ID)}" for ranks in runs]
    assert sorted(store.objects) == names
    merged = decode_records(store.objects[names[1]], "it")
    assert [record.template is KNOWN_ITEMS for record in merged] == [False, False, True]


OTHER = save_name(RUN, 2)
NESTED = b"\x91" * 100_000


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (b"\xc1 not msgpack", "is not a commit record"),
        (xxhash.xxh3_64_digest(NESTED) + NESTED, "is not a commit record"),
        (encode_records([record_of(1)])[:-1] + b"\0", "its digest does not match"),
        (encode_records([record_of(1, save_id=OTHER)]), f"(1, '{OTHER}', 1"),
        (encode_records([record_of(1, iteration=99)]), f"(99, '{SAVE_ID}', 1"),
        (encode_records([record_of(1, file="../../up")]), "'../../up'), expected (1"),
        *(
            (encode_records([record_of(rank) for rank in ranks]), "is the record of")
            for ranks in ([], [0], [1, 2], [2, 1], [1, 1])
        ),
    ],
    ids=range(11),
)
@pytest.mark.parametrize("records", [1], indirect=True)
def test_a_record_with_wrong_contents_is_refused(
    records: Path, planted: bytes, message: str
) -> None:
    name = file_names.record_name(range(1, 2), SAVE_ID)
    (records / file_names.iteration_dir(1) / name).write_bytes(planted)
    with pytest.raises(CorruptCheckpointError, match=re.escape(message)):
        decoded(records)


@of_nodes
def test_a_rank_may_have_two_records_that_agree(records: Path) -> None:
    """The agent was killed after the first put, and the name of that file became visible late."""
    cost = RankCost(started_at=1.0, blocked_s=2.0, staged_s=3.0)
    for other in (record_of(3), record_of(3, cost=cost)):
        write(records, [other])
        merged = decoded(records)
        assert [record.rank for record in merged] == list(range(RANKS))
        assert whole(merged) == ["t0", "t1"]


@of_nodes
def test_contradictory_records_of_a_rank_are_refused(records: Path) -> None:
    for field in ({"nbytes": 2}, {"header_digest": "f"}, {"placement": (99,)}):
        write(records, [record_of(3, **field)])
        with pytest.raises(CorruptCheckpointError, match="two commit records of rank 3 contradict"):
            decoded(records)


@of_nodes
def test_no_template_is_lost_in_any_order_of_reads(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads read the records; the items of the first read are kept."""

    def backwards(read: Callable[[Any], Any], files: Sequence[Any]) -> list[Any]:
        return [read(file) for file in reversed(files)][::-1]

    own = [record_of(rank, template_fingerprint=f"own {rank}") for rank in range(8)]
    write(records, own)
    write(records, own[3:4])
    monkeypatch.setattr("megatron_flashckpt.agent.proposals.for_all", backwards)
    assert whole(decoded(records)) == sorted([*(f"own {rank}" for rank in range(8)), "t0", "t1"])


def test_a_shard_that_is_only_invisible_may_come_and_one_of_another_size_may_not() -> None:
    store, records = MemoryStore(), [record_of(rank) for rank in range(3)]
    names = [f"{file_names.iteration_dir(1)}/{record.file}" for record in records]
    for name in names:
        store.put(name, b"a")
    store.delete(names[1:2])
    with pytest.raises(MissingShardsError, match=f"{records[1].file} is missing: "):
        check_shards(store, 1, records)
    store.put(names[2], b"ab")
    with pytest.raises(CorruptCheckpointError, match=" has 2 bytes instead of 1: ") as raised:
        check_shards(store, 1, records)
    assert not isinstance(raised.value, MissingShardsError)
