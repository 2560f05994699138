"""One rank opens the run for all that save before they could meet in a collective."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from megatron_flashckpt.errors import FlashCkptError, OtherWriterError
from megatron_flashckpt.file_format.file_names import first_sequence, parse_save, save_name
from megatron_flashckpt.file_format.run_object import Ancestor, RunObject
from megatron_flashckpt.save.run import Run, opened_once

RUN = RunObject(name="000003-abcd", ancestors=(Ancestor("000001-aaaa", 10),))
RANKS = 3


@pytest.fixture(autouse=True)
def job_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)


def on_all_ranks(open_run: Callable[[], RunObject]) -> list[RunObject | BaseException]:
    """Return what every rank gets, or raises."""

    def rank(_: int) -> RunObject | BaseException:
        try:
            return opened_once("/save", open_run, 0.0)
        except FlashCkptError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


def test_the_first_rank_opens_the_run_and_the_others_wait_for_it() -> None:
    calls: list[int] = []
    others = threading.Event()

    def open_run() -> RunObject:
        calls.append(1)
        others.wait(0.05)
        return RUN

    assert on_all_ranks(open_run) == [RUN] * RANKS
    assert len(calls) == 1


def test_all_ranks_are_refused_if_the_first_one_is() -> None:
    def refuse() -> RunObject:
        raise OtherWriterError("run 000002-bbbb trains there")

    errors = on_all_ranks(refuse)
    assert all("000002-bbbb" in str(error) for error in errors)


def test_saves_are_numbered_anew_in_every_run() -> None:
    run = Run()
    run.begin(RUN)
    assert [run.new_save_id(2, memory_only=False) for _ in range(2)] == [
        "000003-abcd.02001.1",
        "000003-abcd.02003.1",
    ]
    run.begin(RunObject(name="000004-abcd"))
    assert run.new_save_id(0, memory_only=False) == "000004-abcd.00001.1"


def test_a_save_that_one_rank_missed_changes_no_later_name() -> None:
    runs = [Run(), Run()]
    for run in runs:
        run.begin(RUN)
    runs[0].new_save_id(3, memory_only=False)
    assert len({run.new_save_id(4, memory_only=False) for run in runs}) == 1


def test_no_name_is_used_twice() -> None:
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


def test_a_save_for_memory_leaves_the_name_of_the_save_for_storage() -> None:
    """`flashckpt save-now` and the agents ask for the requested save by its name."""
    run = Run()
    run.begin(RUN)
    run.new_save_id(4, memory_only=True)
    assert run.new_save_id(4, memory_only=False) == save_name(RUN.name, first_sequence(4))
