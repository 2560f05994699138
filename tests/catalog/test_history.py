"""The history of a job: its saves and starts; nothing fails because of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.catalog import history
from megatron_flashckpt.catalog.history import PastSave, PastStart
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format.file_names import HISTORY, event_name, save_name
from megatron_flashckpt.file_format.run_object import Ancestor, RunObject
from megatron_flashckpt.layout.save_cost import RankCost, SaveCost, combine
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.memory_store import MemoryStore

RUN = "000002-abcd"


def past(iteration: int) -> PastSave:
    return PastSave(
        iteration=iteration,
        save_id=save_name(RUN, iteration),
        ended_at=float(iteration),
        seconds=2.0,
        world_size=4,
    )


def test_saves_and_starts_stand_in_the_order_in_which_they_happened() -> None:
    store = MemoryStore()
    run = RunObject(
        name=RUN,
        ancestors=(Ancestor("000001-abcd", 10),),
        save_id=save_name("000001-abcd", 1),
        iteration=10,
        source="memory",
        opened_at=15.0,
        host="node-3",
        world_size=8,
    )
    start = PastStart.of(run)
    for event in (past(10), start, past(20)):
        history.append(store, event)
    assert history.events(store) == [past(10), start, past(20)]
    assert (start.save_id, start.source, start.started_at) == (run.save_id, "memory", 15.0)


def test_a_start_keeps_the_newest_saves_however_often_the_job_starts() -> None:
    store = MemoryStore()
    for number in range(5):
        history.append(store, past(number))
    for number in range(9):
        history.append(store, PastStart(run=RUN, started_at=10.0 + number))
    history.shorten(store, 3)
    events = history.events(store)
    assert events[:3] == [past(2), past(3), past(4)]
    assert [event.started_at for event in events[3:]] == [16.0, 17.0, 18.0]


def test_a_history_that_is_too_long_to_read_keeps_the_last_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "_MOST", 5)
    store = MemoryStore()
    for iteration in range(1, 31):
        history.append(store, past(iteration))
        assert history.events(store)[-1].iteration == iteration
    assert [save.iteration for save in history.events(store)] == [26, 27, 28, 29, 30]


def test_events_that_cannot_be_decoded_are_skipped() -> None:
    store = MemoryStore()
    history.append(store, past(9))
    for sequence, data in enumerate((b"", b"\xff\xfe", b"[]", b"{"), 20):
        store.put(event_name(1.0, save_name(RUN, sequence)), data)
    store.put(f"{HISTORY}/notes.txt", b"{}")
    assert history.events(store) == [past(9)]
    history.shorten(store, 1)
    assert set(store.objects) == {f"{HISTORY}/notes.txt", event_name(9.0, save_name(RUN, 9))}


def test_a_save_is_found_by_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store, gets = MemoryStore(), list[str]()
    for iteration in range(1, 9):
        history.append(store, past(iteration))
    get = store.get
    monkeypatch.setattr(store, "get", lambda name, *range: gets.append(name) or get(name, *range))
    assert history.find(store, past(5).save_id) == past(5)
    assert history.find(store, save_name(RUN, 99)) is None
    assert len(gets) == 1


@pytest.mark.parametrize("what", ["file", "link to nothing"])
def test_what_stands_in_its_place_is_no_history_and_stays(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / HISTORY
    path.parent.mkdir()
    if what == "file":
        path.write_bytes(msgspec.json.encode(past(9)))
    else:
        path.symlink_to(tmp_path / "nothing")
    store = PosixStore(tmp_path)
    assert history.events(store) == []
    before = path.lstat()
    history.append(store, past(1))
    history.shorten(store, 1)
    assert f"{HISTORY} was not updated" in caplog.text
    assert path.lstat().st_ino == before.st_ino


def test_an_error_of_storage_loses_no_history(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise StorageError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    store = MemoryStore()
    history.append(store, past(1))
    with monkeypatch.context() as away:
        away.setattr(store, "get", refuse)
        history.shorten(store, 1)
        assert history.events(store) == []
    assert "the history of saves cannot be read" in caplog.text
    assert history.events(store) == [past(1)]


def test_timings_are_those_of_the_slowest_rank_and_need_rank_0() -> None:
    costs = {
        rank: RankCost(
            started_at=10.0, blocked_s=0.1 * rank, staged_s=1.0 + rank / 2, persisted_s=2.0 + rank
        )
        for rank in range(3)
    }
    expected = SaveCost(
        nbytes=500,
        started_at=10.0,
        blocked_s=0.2,
        staged_s=2.0,
        persisted_s=4.0,
        slowest=2,
        durable_s=6.0,
    )
    assert combine(costs, 500, 16.0) == expected
    # Rank 0 called later, or its clock is ahead: a save is not durable before its last shard.
    early = combine(costs, 500, 13.0)
    assert early == msgspec.structs.replace(expected, durable_s=4.0)
    del costs[0]
    assert combine(costs, 500, 16.0) is None
