"""One rank opens the run for all that save before they could meet in a collective."""

from __future__ import annotations

import concurrent.futures
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_flashckpt.errors import FlashCkptError, OtherWriterError
from megatron_flashckpt.file_format.file_names import first_sequence, parse_save, save_name
from megatron_flashckpt.file_format.run_object import Ancestor, RunObject
from megatron_flashckpt.save import run as run_module
from megatron_flashckpt.save.run import Run, opened_once

RUN = RunObject(name="000003-abcd", ancestors=(Ancestor("000001-aaaa", 10),))
RANKS = 3


_of_thread = threading.local()


@pytest.fixture(autouse=True)
def job_store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: getattr(_of_thread, "rank", 0))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


def on_all_ranks(open_run: Callable[[], RunObject]) -> list[RunObject | BaseException]:
    """Return what every rank gets, or raises."""

    def rank(number: int) -> RunObject | BaseException:
        _of_thread.rank = number
        try:
            return opened_once("/save", open_run, 0.0)
        except FlashCkptError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_first_rank_opens_the_run_and_the_others_wait_for_it(is_refused: bool) -> None:
    calls: list[int] = []

    def open_run() -> RunObject:
        calls.append(1)
        threading.Event().wait(0.05)
        if is_refused:
            raise OtherWriterError("run 000002-bbbb trains there")
        return RUN

    results = on_all_ranks(open_run)
    assert len(calls) == 1
    if is_refused:
        assert all("000002-bbbb" in str(error) for error in results)
    else:
        assert results == [RUN] * RANKS


def gone() -> Any:
    """Return the client of a store whose process has ended."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return dist.TCPStore("127.0.0.1", server.port, is_master=False)


def hanging() -> Any:
    return SimpleNamespace(compare_set=lambda *_: threading.Event().wait(60.0))


def unfinished() -> Any:
    """Return the store in which another rank has begun to open the run, and does not end."""
    store = dist.HashStore()
    store.compare_set("megatron_flashckpt/run//save/opener", "", "1")
    return store


@pytest.mark.parametrize("failing", [gone, hanging, unfinished])
def test_a_store_that_gives_no_run_ends_the_save_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, failing: Callable[[], Any]
) -> None:
    store = failing()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(run_module, "_OPENED_S", 0.1)
    monkeypatch.setattr(run_module, "_ANSWER_S", 0.5)
    with pytest.raises(FlashCkptError) as raised:
        opened_once("/save", lambda: RUN, 0.0)
    assert re.fullmatch(
        r"/save: this rank does not learn under which run the job saves, because the job's "
        r"rendezvous store .+; load before training.*",
        str(raised.value),
    )


@pytest.mark.parametrize("late", ["compare_set", "set"])
def test_a_request_that_the_store_answers_too_late_is_repeated_by_the_next_save(
    monkeypatch: pytest.MonkeyPatch, job_store: dist.Store, late: str
) -> None:
    """The store has done it meanwhile."""
    answers, has_answered = threading.Event(), threading.Event()

    def answer(*request: Any) -> Any:
        given = getattr(job_store, late)(*request)
        assert answers.wait(20.0)
        has_answered.set()
        return given

    names = ("compare_set", "set", "check", "wait", "get")
    store = SimpleNamespace(**{name: getattr(job_store, name) for name in names} | {late: answer})
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(run_module, "_ANSWER_S", 0.5)
    opened = iter([RUN, RunObject(name="000004-abcd")])
    with pytest.raises(FlashCkptError, match="hangs"):
        opened_once("/save", lambda: next(opened), 0.0)
    answers.set()
    assert has_answered.wait(20.0)
    assert on_all_ranks(lambda: next(opened)) == [RUN] * RANKS


def test_the_error_of_the_first_rank_counts_though_the_store_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store: Any = SimpleNamespace(compare_set=lambda *_: b"0", check=lambda _: False)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def refuse(*_: object) -> None:
        raise dist.DistNetworkError("connection closed")

    def open_run() -> RunObject:
        raise OtherWriterError("run 000002-bbbb trains there")

    store.set = refuse
    with pytest.raises(OtherWriterError, match="000002-bbbb"):
        opened_once("/save", open_run, 0.0)


def test_no_name_is_used_twice_and_every_run_counts_anew() -> None:
    """Not even if a loop goes back, or saves one iteration again and again."""
    run = Run()
    run.begin(RUN)
    iterations = [5, *[6] * 1500, 7, 6, 6, 8, 9]
    names = [
        [parse_save(run.new_save_id(iteration, memory_only=kind)) for iteration in iterations]
        for kind in (False, True)
    ]
    assert names == [sorted(set(of_kind)) for of_kind in names]
    assert not set(names[0]).intersection(names[1])
    run.begin(RunObject(name="000004-abcd"))
    assert run.new_save_id(0, memory_only=False) == "000004-abcd.00001.1"


@pytest.mark.parametrize("memory_only", [False, True])
def test_a_save_that_one_rank_missed_changes_no_later_name(memory_only: bool) -> None:
    """`flashckpt save-now` and the agents ask for the requested save by its name."""
    runs = [Run(), Run()]
    for run in runs:
        run.begin(RUN)
    runs[0].new_save_id(4 if memory_only else 3, memory_only=memory_only)
    names = {run.new_save_id(4, memory_only=False) for run in runs}
    assert names == {save_name(RUN.name, first_sequence(4))}
