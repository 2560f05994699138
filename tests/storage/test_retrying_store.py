"""Retries by class of error, with a clock that the tests own."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megatron_flashckpt.error_classes import TABLE
from megatron_flashckpt.errors import AlreadyExistsError, StorageError, is_damage
from megatron_flashckpt.storage import retrying_store
from megatron_flashckpt.storage.posix_store import PosixStore
from megatron_flashckpt.storage.retrying_store import RetryingStore, load_patience_s
from megatron_flashckpt.storage.scatter_read import BLOCK_NBYTES, KeptFiles
from tests.support.memory_store import MemoryStore

PASSING = sorted(number for number, of in TABLE.items() if of.may_pass)
CONTENT = random.Random(1).randbytes(3 * BLOCK_NBYTES + 100)


class Clock:
    """A stand-in for the module `time` whose clock only the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retrying_store, "time", clock)
    monkeypatch.setattr(retrying_store, "_JITTER", 0.0)
    return clock


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
            raise StorageError(self._number, os.strerror(self._number))
        return self._call(*args, **named)


class FailingStore(MemoryStore):
    """A store whose `list` fails, and takes `attempt_s` of the clock each time."""

    def __init__(self, clock: Clock, number: int, attempt_s: float = 0.0) -> None:
        super().__init__()
        self._clock, self._number, self._attempt_s = clock, number, attempt_s
        self.calls = 0

    def list(self, directory: str, *, sizes: bool = True) -> Any:
        self.calls += 1
        self._clock.now += self._attempt_s
        raise StorageError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", TABLE, ids=errno.errorcode.get)
def test_the_class_of_an_error_decides_how_long_it_is_retried(
    clock: Clock, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    store, dice = FailingStore(clock, number), random.getstate()
    with caplog.at_level(logging.WARNING), pytest.raises(StorageError) as caught:
        RetryingStore(store, call_s=300.0).list("")
    assert caught.value.errno == number
    assert random.getstate() == dice, "training's generator is left alone"
    assert len(caplog.messages) == store.calls - 1
    if number not in PASSING:
        assert store.calls == 1
    elif is_damage(caught.value):
        assert (store.calls, clock.now) == (5, 30.5), "then an older checkpoint is loaded"
    else:
        assert 280.0 < clock.now <= 300.0, "until the deadline"


@pytest.mark.parametrize(
    ("attempt_s", "calls"),
    [(0.0, [9, 3, 3]), (20.0, [5, 1, 1]), (180.0, [1, 1, 1])],
    ids=["at once", "after 20 s", "a soft mount of NFS"],
)
def test_the_retries_of_a_load_end_before_waiting_ranks_time_out(
    clock: Clock, attempt_s: float, calls: list[int]
) -> None:
    """Without a common limit, each of a thousand files could take its own two minutes."""
    store = FailingStore(clock, errno.ETIMEDOUT, attempt_s)
    patience_s = load_patience_s(600.0)
    retrying = RetryingStore(store, call_s=patience_s, total_s=patience_s)
    counts = []
    for _ in calls:
        store.calls = 0
        with pytest.raises(StorageError):
            retrying.list("")
        counts.append(store.calls)
    assert counts == calls
    assert load_patience_s(60.0) < load_patience_s() == patience_s


def test_simultaneous_pauses_of_threads_count_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    monkeypatch.setattr(store, "list", FailingFunction(store.list, errno.EIO, 4))
    asleep, slept = threading.Barrier(4), []

    def sleep(seconds: float) -> None:
        asleep.wait(60.0)
        slept.append(seconds)

    monkeypatch.setattr(clock, "sleep", sleep)
    retrying = RetryingStore(store, total_s=1.0)
    threads = [threading.Thread(target=retrying.list, args=("",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert slept == [0.5] * 4, "each thread has waited, though the sum is 2 s"


# ---------------------------------------------------------------------- create


class LostAnswers(MemoryStore):
    """A store whose `create` fails after `contents`, or what it was given, has the name."""

    def __init__(self, contents: bytes | None) -> None:
        super().__init__()
        self._contents = contents
        self.durable: list[str] = []

    def create(self, name: str, data: bytes) -> None:
        if name in self.objects:
            super().create(name, data)
        self.objects[name] = data if self._contents is None else self._contents
        raise StorageError(errno.ETIMEDOUT, "lost answer")

    def make_durable(self, name: str) -> None:
        self.durable.append(name)


@pytest.mark.parametrize("contents", [None, b"theirs"], ids=["its own", "another"])
def test_a_retried_create_succeeds_only_if_it_meets_its_own_object(contents: bytes | None) -> None:
    store = LostAnswers(contents)
    if contents is None:
        RetryingStore(store).create("end", b"mine")
        assert store.durable == ["end"], "the attempt may have failed before the name was durable"
    for _ in range(2):  # without an error, an equal object is that of another process
        with pytest.raises(AlreadyExistsError):
            RetryingStore(store).create("end", b"mine")
    assert store.objects == {"end": contents or b"mine"}


# ---------------------------------------------------------------------- get_into


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("first", [1, 3], ids=["at once", "in mid-file"])
def test_retries_read_and_digest_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, first: int
) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    monkeypatch.setattr(os, "preadv", FailingFunction(os.preadv, number, 2, first))
    data, other = bytearray(BLOCK_NBYTES + 7), bytearray(len(CONTENT))
    digest, kept = xxhash.xxh3_64(), KeptFiles()
    parts = [memoryview(data), memoryview(other)]
    store = RetryingStore(PosixStore(tmp_path))
    assert store.get_into("file", 10, parts, digest.update, kept) == len(CONTENT) - 10
    assert bytes(data + other)[: len(CONTENT) - 10] == CONTENT[10:]
    assert digest.hexdigest() == xxhash.xxh3_64_hexdigest(CONTENT[10:])


def test_a_file_replaced_by_another_host_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RetryingStore(PosixStore(tmp_path))
    store.put("file", b"1234")
    data, kept = bytearray(4), KeptFiles()
    store.get_into("file", 0, [memoryview(data)], kept=kept)
    store.put("file", b"abcd")
    monkeypatch.setattr(os, "preadv", FailingFunction(os.preadv, errno.ESTALE, 1))
    assert store.get_into("file", 0, [memoryview(data)], kept=kept) == 4
    assert data == b"abcd"
