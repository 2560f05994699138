"""The outcomes of saves: the state at the end of training, and failures that end it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import SaveFailedError
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.save import session as session_module
from megatron_flashckpt.save.request import SaveReport, SaveRequest
from megatron_flashckpt.save.save_reports import SaveReports
from megatron_flashckpt.save.session import Session, _MegatronSaves
from megatron_flashckpt.tracing import Recorder


def expects_save(monkeypatch: pytest.MonkeyPatch, requested: list[int], **args: Any) -> bool:
    """Return the answer after saves to storage of the iterations in `requested`."""
    megatron = SimpleNamespace(get_args=lambda: SimpleNamespace(**args))
    monkeypatch.setattr(session_module, "get_args", megatron.get_args)
    reports = SaveReports("save", 0)
    for iteration in requested:
        reports.requested(iteration)
    session = Session(Config())
    session._open["save"] = _MegatronSaves(None, reports, None)  # type: ignore[arg-type]
    return session.expects_save()


class _Checkpointer:
    """Notes each time that the last state is saved to storage."""

    rank = 0
    pending = False
    config = Config()

    def __init__(self) -> None:
        self.written = 0
        self.saves = SimpleNamespace(poll=list)

    def write_last(self) -> SaveReport:
        self.written += 1
        return SaveReport(SaveRequest(5, JobState(chunks=[])), Recorder(), "id")


@pytest.mark.parametrize(
    ("requested", "written"),
    [
        pytest.param([2, 4, 5], [1, 1], id="skipped"),
        pytest.param([2, 4], [0, 1], id="memory only, or none"),
    ],
)
def test_the_last_state_of_a_job_that_exits_in_its_last_iteration_is_written(
    monkeypatch: pytest.MonkeyPatch, requested: list[int], written: list[int]
) -> None:
    """After the loop Megatron saves a state that it has not yet requested to save to storage.

    But if the loop ends with an exit, Megatron does not.
    """
    args = SimpleNamespace(train_iters=5, save_interval=2)
    megatron = SimpleNamespace(get_args=lambda: args)
    monkeypatch.setattr(session_module, "get_args", megatron.get_args)
    reports, checkpointer = SaveReports("save", 0), _Checkpointer()
    for iteration in requested:
        reports.requested(iteration)
    opened: Any = _MegatronSaves(checkpointer, reports, None)  # type: ignore[arg-type]
    opened.unwritten = 5
    session = Session(Config())
    session._open["save"] = opened
    counts = []
    for exits in (False, True):
        session.finalize(blocking=False, last=True, exits=exits)
        counts.append(checkpointer.written)
    assert counts == written


@pytest.mark.parametrize("requested", [[], [2, 4]])
def test_a_save_is_expected_after_a_loop_that_ends_between_two_saves(
    monkeypatch: pytest.MonkeyPatch, requested: list[int]
) -> None:
    assert expects_save(monkeypatch, requested, train_iters=5, save_interval=2)


@pytest.mark.parametrize(
    ("requested", "args"),
    [
        ([2, 4, 5], {"train_iters": 5, "save_interval": 2}),
        ([2, 4], {"train_iters": 4, "save_interval": 2}),
        ([2, 4], {"train_iters": 5, "save_interval": 2, "skip_train": True}),
        ([2, 4], {"train_iters": 5, "save_interval": None}),
        ([2, 4], {"train_iters": None, "save_interval": 2}),
        ([2, 4], {}),
    ],
)
def test_no_save_is_expected_after_the_last_one(
    monkeypatch: pytest.MonkeyPatch, requested: list[int], args: dict[str, Any]
) -> None:
    assert not expects_save(monkeypatch, requested, **args)


def test_without_an_open_checkpointer_no_save_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron = SimpleNamespace(get_args=lambda: SimpleNamespace(train_iters=5, save_interval=2))
    monkeypatch.setattr(session_module, "get_args", megatron.get_args)
    assert not Session(Config()).expects_save()


@pytest.mark.parametrize("failed", [[2], [2, 4]])
def test_a_rank_that_learns_late_of_failures_stops_with_the_message_of_the_others(
    monkeypatch: pytest.MonkeyPatch, failed: list[int]
) -> None:
    args = SimpleNamespace(train_iters=12, save_interval=2)
    monkeypatch.setattr(session_module, "get_args", lambda: args)
    checkpointer: Any = _Checkpointer()
    outcomes = [Outcome(number, f"s{number}", "disk full", 0.1, lasts=True) for number in failed]
    traces = SimpleNamespace(end=lambda save_id: None)
    checkpointer.saves = SimpleNamespace(poll=lambda: outcomes, traces=traces)
    session = Session(Config())
    session._open["save"] = _MegatronSaves(checkpointer, SaveReports("save", 0), None)  # type: ignore[arg-type]
    with pytest.raises(SaveFailedError) as caught:
        session.finalize(blocking=False)
    assert str(caught.value).startswith("training stops")
    assert "iteration 2 has failed" in str(caught.value)
    assert "iteration 4" not in str(caught.value)


def test_only_a_new_attempt_forgets_saves_when_process_groups_are_made_anew() -> None:
    closed: list[bool] = []
    checkpointer: Any = SimpleNamespace(
        rank=0,
        close=lambda *, leave: closed.append(leave),
        link=SimpleNamespace(stager=SimpleNamespace(wait_copied=lambda: None)),
    )
    session = Session(Config())
    for opens in (True, False):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            if opens:
                session.begin_attempt()
                session._open["save"] = _MegatronSaves(checkpointer, SaveReports("save", 0), None)  # type: ignore[arg-type]
            session.wait_copied()
            assert list(session._open) == ["save"]
            if not opens:
                session.begin_attempt()
        finally:
            dist.destroy_process_group()
    assert not session._open
    assert closed == [False], "the agent would free the slots from which the attempt resumes"
