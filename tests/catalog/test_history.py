"""The history of a job: its saves and starts; nothing fails because of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.catalog import history
from megatron_flashckpt.catalog.history import PastSave, PastStart
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format.file_names import HISTORY, save_name
from megatron_flashckpt.file_format.run_object import Ancestor, RunObject
from megatron_flashckpt.layout.save_cost import RankCost, SaveCost, combine
from megatron_flashckpt.storage.memory_store import MemoryStore
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.trainer import PATIENCE_S

RUN = "000002-abcd"


def past(iteration: int) -> PastSave:
    return PastSave(
        iteration=iteration,
        save_id=save_name(RUN, iteration),
        ended_at=1.0,
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
        opened_at=5.0,
        host="node-3",
        world_size=8,
    )
    start = PastStart.of(run)
    for event in (past(10), start, past(20)):
        history.append(store, event)
    assert history.events(store) == [past(10), start, past(20)]
    assert [save.iteration for save in history.read(store)] == [10, 20]
    assert (start.save_id, start.source, start.started_at) == (run.save_id, "memory", 5.0)


def test_a_start_keeps_the_newest_saves_however_often_the_job_starts() -> None:
    store = MemoryStore()
    for number in range(5):
        history.append(store, past(number))
    for number in range(9):
        history.append(store, PastStart(run=RUN, started_at=float(number)))
    history.shorten(store, 3)
    assert [save.iteration for save in history.read(store)] == [2, 3, 4]
    assert [event.started_at for event in history.events(store)[3:]] == [6.0, 7.0, 8.0]


def test_a_history_that_is_too_long_to_read_keeps_the_last_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "_MAX_NBYTES", 1000)
    store = MemoryStore()
    for iteration in range(1, 31):
        history.append(store, past(iteration))
        assert history.read(store)[-1].iteration == iteration
    iterations = [save.iteration for save in history.read(store)]
    assert iterations == list(range(31 - len(iterations), 31))


_APPENDS = """
import sys
from pathlib import Path
from megatron_flashckpt.catalog.history import PastStart, append
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.trainer import PATIENCE_S
sys.stdin.read()
for number in range(100):
    append(PosixStore(Path(sys.argv[1])), PastStart(run=sys.argv[2], started_at=number))
"""


def test_lines_of_two_processes_that_append_at_once_all_stand(tmp_path: Path) -> None:
    """The agent of an earlier run and rank 0 of the next one both write."""
    names = ["000001-aaaa", "000002-bbbb"]
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _APPENDS, str(tmp_path), name], stdin=subprocess.PIPE
        )
        for name in names
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()  # both begin
    assert [writer.wait(PATIENCE_S) for writer in writers] == [0, 0]
    events = history.events(PosixStore(tmp_path))
    starts = [event for event in events if isinstance(event, PastStart)]
    for name in names:
        assert [start.started_at for start in starts if start.run == name] == list(range(100))


def test_lines_that_cannot_be_decoded_are_skipped() -> None:
    store = MemoryStore()
    store.put(HISTORY, b"\xff\xfe\n{\n" + msgspec.json.encode(past(9)) + b"\n[]\n")
    assert history.read(store) == [past(9)]


def test_a_torn_line_costs_no_other_line() -> None:
    """The disk was full, or the machine lost power, after a part of the line."""
    store = MemoryStore()
    history.append(store, past(1))
    history.append(store, past(2))
    store.append(HISTORY, (b"\n" + msgspec.json.encode(past(3)))[:20])
    history.append(store, past(4))
    assert history.read(store) == [past(1), past(2), past(4)]
    history.shorten(store, 2)
    history.append(store, past(5))
    assert history.read(store) == [past(2), past(4), past(5)]


@pytest.mark.parametrize("what", ["link", "link to nothing", "directory", "pipe"])
def test_what_stands_in_its_place_is_no_history_and_stays(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / HISTORY
    path.parent.mkdir()
    match what:
        case "link":
            (tmp_path / "elsewhere").write_bytes(msgspec.json.encode(past(9)))
            path.symlink_to(tmp_path / "elsewhere")
        case "link to nothing":
            path.symlink_to(tmp_path / "nothing")
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    store = PosixStore(tmp_path)
    assert history.read(store) == []
    history.append(store, past(1))
    history.shorten(store, 1)
    assert f"{HISTORY} was not updated" in caplog.text
    assert not path.is_file() or path.is_symlink()


def test_an_error_of_storage_loses_no_history(caplog: pytest.LogCaptureFixture) -> None:
    class Away(MemoryStore):
        is_away = False

        def get(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
            if self.is_away:
                raise StorageError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            return super().get(name, offset, nbytes)

    store = Away()
    history.append(store, past(1))
    store.is_away = True
    history.shorten(store, 1)
    assert history.read(store) == []
    assert "the history of saves cannot be read" in caplog.text
    store.is_away = False
    assert history.read(store) == [past(1)]


def test_timings_are_those_of_the_slowest_rank_and_need_rank_0() -> None:
    costs = {
        rank: RankCost(started_at=10.0, blocked_s=0.1 * rank, staged_s=1.0, persisted_s=2.0 + rank)
        for rank in range(3)
    }
    assert combine(costs, 500, 16.0) == SaveCost(
        nbytes=500,
        started_at=10.0,
        blocked_s=0.2,
        staged_s=1.0,
        persisted_s=4.0,
        slowest=2,
        durable_s=6.0,
    )
    del costs[0]
    assert combine(costs, 500, 16.0) is None


def test_a_save_is_durable_no_earlier_than_its_last_shard() -> None:
    # Rank 1 called 5 ms before rank 0, or the clock of its node is 5 ms behind.
    costs = {
        rank: RankCost(started_at=started_at, blocked_s=0.0, staged_s=0.01, persisted_s=0.03)
        for rank, started_at in ((0, 10.005), (1, 10.0))
    }
    combined = combine(costs, 500, 10.034)
    assert combined is not None
    assert combined.durable_s == combined.persisted_s == 0.03
