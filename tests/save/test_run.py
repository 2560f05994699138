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
