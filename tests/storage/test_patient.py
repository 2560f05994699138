"""Retries of a load's reads after transient errors; lasting errors keep their class."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from megatron_flashckpt.error_classes import TABLE
from megatron_flashckpt.errors import StorageError, is_damage
from megatron_flashckpt.load import resume
from megatron_flashckpt.storage import patient
from megatron_flashckpt.storage.patient import RetryingStorage
from megatron_flashckpt.storage.posix import PosixStorage
from megatron_flashckpt.storage.scatter_read import BLOCK_NBYTES, KeptFiles

PASSING = sorted(number for number, of in TABLE.items() if of.may_pass)
CONTENT = random.Random(1).randbytes(3 * BLOCK_NBYTES + 100)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient, "RETRIES_S", (0.001, 0.001, 0.001))


@pytest.fixture
def storage(tmp_path: Path) -> RetryingStorage:
    (tmp_path / "file").write_bytes(CONTENT)
    return RetryingStorage(PosixStorage(tmp_path))


class FailingFunction:
    """A function that fails `count` times, from its call number `first` on."""

    def __init__(self, call: Callable[..., Any], number: int, count: int, first: int = 1) -> None:
        self._call, self._number = call, number
        self._fails = range(first, first + count)
        self._lock = threading.Lock()
        self.calls = 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        with self._lock:
            self.calls += 1
            fails = self.calls in self._fails
        if fails:
            raise OSError(self._number, os.strerror(self._number))
        return self._call(*args, **named)


OPERATIONS: dict[str, tuple[str, Callable[[RetryingStorage], object], object]] = {
    "read": ("open", lambda retrying: retrying.read("file"), CONTENT),
    "size": ("stat", lambda retrying: retrying.size("file"), len(CONTENT)),
    "list": ("listdir", lambda retrying: retrying.list(""), ["file"]),
    "present": (
        "open",
        lambda retrying: retrying.present("", (n for n in ["file", "no"])),
        {"file"},
    ),
    "kind": ("stat", lambda retrying: retrying.kind("file"), "file"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_read_succeeds_after_as_many_errors_as_retries(
    storage: RetryingStorage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operation: str,
) -> None:
    call, work, expected = OPERATIONS[operation]
    refusing = FailingFunction(getattr(os, call), errno.EIO, 3)
    monkeypatch.setattr(os, call, refusing)
    with caplog.at_level(logging.WARNING):
        assert work(storage) == expected
    assert refusing.calls >= 4
    assert [f"retry {n} of 3" in line for n, line in enumerate(caplog.messages, 1)] == [True] * 3
    assert all(storage.place in line for line in caplog.messages)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_lasting_error_is_raised_unchanged(
    storage: RetryingStorage, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    call, work, _ = OPERATIONS[operation]
    refusing = FailingFunction(getattr(os, call), errno.ETIMEDOUT, 100)
    monkeypatch.setattr(os, call, refusing)
    with pytest.raises(StorageError, match="storage is unavailable") as caught:
        work(storage)
    assert refusing.calls == 4
    assert not is_damage(caught.value), "the error must not cost an iteration"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ELOOP, errno.EUCLEAN])
def test_a_permanent_error_is_not_retried(
    storage: RetryingStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refusing = FailingFunction(os.listdir, number, 1)
    monkeypatch.setattr(os, "listdir", refusing)
    with pytest.raises(StorageError):
        storage.list("")
    assert refusing.calls == 1


def test_a_missing_file_is_not_retried(
    storage: RetryingStorage, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read("other")
    assert caplog.messages == []


@pytest.mark.parametrize(
    "number", [n for n in PASSING if n != errno.EINTR], ids=errno.errorcode.get
)
@pytest.mark.parametrize("first", [1, 3], ids=["at once", "in mid-file"])
def test_retries_read_and_digest_each_byte_once(
    storage: RetryingStorage, monkeypatch: pytest.MonkeyPatch, number: int, first: int
) -> None:
    monkeypatch.setattr(os, "preadv", FailingFunction(os.preadv, number, 2, first))
    data, other = bytearray(BLOCK_NBYTES + 7), bytearray(len(CONTENT))
    digest, kept = xxhash.xxh3_64(), KeptFiles()
    parts = [memoryview(data), memoryview(other)]
    assert storage.read_into("file", 10, parts, digest.update, kept) == len(CONTENT) - 10
    assert bytes(data + other)[: len(CONTENT) - 10] == CONTENT[10:]
    assert digest.hexdigest() == xxhash.xxh3_64_hexdigest(CONTENT[10:])


def test_a_file_replaced_by_another_host_is_opened_again(
    storage: RetryingStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data, kept = bytearray(4), KeptFiles()
    storage.read_into("file", 0, [memoryview(data)], kept=kept)
    (tmp_path / "new").write_bytes(b"abcd")
    os.replace(tmp_path / "new", tmp_path / "file")
    monkeypatch.setattr(os, "preadv", FailingFunction(os.preadv, errno.ESTALE, 1))
    assert storage.read_into("file", 0, [memoryview(data)], kept=kept) == 4
    assert data == b"abcd"


class Clock:
    """A stand-in for the module `time` whose clock only the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("attempt_s", "calls"),
    [(0.0, [4, 4, 4, 4, 1, 1]), (20.0, [4, 2, 1, 1, 1, 1]), (180.0, [1, 1, 1, 1, 1, 1])],
    ids=["at once", "after 20 s", "a soft mount of NFS"],
)
def test_the_retries_of_a_load_end_before_waiting_ranks_time_out(
    storage: RetryingStorage, monkeypatch: pytest.MonkeyPatch, attempt_s: float, calls: list[int]
) -> None:
    """Without a common limit, each of a thousand files could take up to twelve minutes."""
    clock = Clock()
    monkeypatch.setattr(patient, "time", clock)
    monkeypatch.setattr(patient, "RETRIES_S", (2.0, 8.0, 20.0))
    monkeypatch.setattr(patient, "_JITTER", 0.0)

    def refuse(_: object) -> list[str]:
        clock.now += attempt_s
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    refusing = FailingFunction(refuse, errno.EIO, 0)
    monkeypatch.setattr(os, "listdir", refusing)
    counts = []
    for _ in calls:
        refusing.calls = 0
        with pytest.raises(StorageError):
            storage.list("")
        counts.append(refusing.calls)
    assert counts == calls


@pytest.mark.parametrize(("minutes", "calls"), [(1, 3), (10, 4), (60, 4), (None, 4)])
def test_a_job_with_a_shorter_collective_timeout_retries_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: int | None, calls: int
) -> None:
    monkeypatch.setattr(patient, "time", Clock())
    monkeypatch.setattr(patient, "RETRIES_S", (2.0, 8.0, 20.0))
    refusing = FailingFunction(os.listdir, errno.EIO, 1000)
    monkeypatch.setattr(os, "listdir", refusing)
    margs = SimpleNamespace(distributed_timeout_minutes=minutes)
    with pytest.raises(StorageError):
        resume._retrying_storage(margs, str(tmp_path)).list("")
    assert refusing.calls == calls


def test_simultaneous_pauses_of_threads_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = RetryingStorage(PosixStorage(tmp_path), 15.0)
    asleep, slept = threading.Barrier(4), []

    def sleep(seconds: float) -> None:
        asleep.wait(60.0)
        slept.append(seconds)

    monkeypatch.setattr(patient, "RETRIES_S", (2.0,))
    monkeypatch.setattr(patient.time, "sleep", sleep)
    monkeypatch.setattr(os, "listdir", FailingFunction(os.listdir, errno.EIO, 4))
    threads = [threading.Thread(target=storage.list, args=("",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(slept) == 4, "each thread has waited, though the sum is 8 s"
    assert all(1.8 <= seconds <= 2.2 for seconds in slept)


def test_retries_leave_the_global_random_generator_alone(
    storage: RetryingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = random.getstate()
    monkeypatch.setattr(os, "listdir", FailingFunction(os.listdir, errno.EIO, 2))
    storage.list("")
    assert random.getstate() == before
