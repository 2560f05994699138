"""The outcomes of saves: the state at the end of training, and failures that end it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import eq
from pathlib import Path
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


class _Checkpointer:
    """Notes each time that the last state is saved to storage."""

    rank = 0
    pending = False
    config = Config()

    def __init__(self, outcomes: Sequence[Outcome] = ()) -> None:
        self.written = 0
        self.saves = SimpleNamespace(poll=lambda: list(outcomes))

    def write_last(self) -> SaveReport:
        self.written += 1
        return SaveReport(SaveRequest(5, JobState(chunks=[])), Recorder(), "id")


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The job's arguments: it ends between two saves."""
    made = SimpleNamespace(train_iters=5, save_interval=2)
    monkeypatch.setattr(session_module, "get_args", lambda: made)
    return made


def session_of(checkpointer: Any, requested: Sequence[int] = ()) -> Session:
    """Return a session after saves to storage of the iterations in `requested`."""
    reports = SaveReports("save", 0)
    for iteration in requested:
        reports.requested(iteration)
    session = Session(Config())
    session._open["save"] = _MegatronSaves(checkpointer, reports, None)  # type: ignore[arg-type]
    return session


@pytest.mark.parametrize(
    ("requested", "written"),
    [
        pytest.param([2, 4, 5], [1, 1], id="skipped"),
        pytest.param([2, 4], [0, 1], id="memory only, or none"),
    ],
)
@pytest.mark.usefixtures("args")
def test_the_last_state_of_a_job_that_exits_in_its_last_iteration_is_written(
    requested: list[int], written: list[int]
) -> None:
    """After the loop Megatron saves a state that it has not yet requested to save to storage.

    But if the loop ends with an exit, Megatron does not.
    """
    checkpointer = _Checkpointer()
    session = session_of(checkpointer, requested)
    session._open["save"].unwritten = 5
    counts = []
    for exits in (False, True):
        session.finalize(blocking=False, last=True, exits=exits)
        counts.append(checkpointer.written)
    assert counts == written


@pytest.mark.parametrize(
    ("requested", "changed", "is_expected"),
    [
        ([], {}, True),
        ([2, 4], {}, True),
        ([2, 4, 5], {}, False),
        ([2, 4], {"train_iters": 4}, False),
        ([2, 4], {"skip_train": True}, False),
        ([2, 4], {"save_interval": None}, False),
        ([2, 4], {"train_iters": None}, False),
    ],
)
def test_a_save_is_expected_after_a_loop_that_ends_between_two_saves(
    args: SimpleNamespace, requested: list[int], changed: dict[str, Any], is_expected: bool
) -> None:
    vars(args).update(changed)
    assert session_of(None, requested).expects_save() == is_expected
    assert not Session(Config()).expects_save(), "nobody has saved"
    vars(args).clear()
    assert not session_of(None, requested).expects_save()


@pytest.mark.usefixtures("args")
@pytest.mark.parametrize("failed", [[2], [2, 4]])
def test_a_rank_that_learns_late_of_failures_stops_with_the_message_of_the_others(
    failed: list[int],
) -> None:
    outcomes = [Outcome(number, f"s{number}", "disk full", 0.1, lasts=True) for number in failed]
    with pytest.raises(SaveFailedError, match=r"^training stops.*iteration 2 has failed") as caught:
        session_of(_Checkpointer(outcomes)).finalize(blocking=False)
    assert "iteration 4" not in str(caught.value)


@pytest.mark.usefixtures("args")
def test_a_relative_save_directory_follows_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every name of a directory finds the one checkpointer; each directory has its own."""
    session, places = Session(Config()), [tmp_path / "one", tmp_path / "other"]
    made = []
    for place in places:
        place.mkdir()
        monkeypatch.chdir(place)
        checkpointer = session.checkpointer("save")
        for name in ("save", "./save/", f"{place}/save", f"{place}/save/"):
            assert session.checkpointer(name) is checkpointer
        made.append(checkpointer)
        monkeypatch.setattr(checkpointer.link, "save_requested", partial(eq, len(made)))
    assert [checkpointer.root for checkpointer in made] == [f"{place}/save" for place in places]
    assert [session.save_requested("save", iteration) for iteration in (1, 2)] == [False, True]
    monkeypatch.chdir(places[0])
    assert [session.save_requested("save", iteration) for iteration in (1, 2)] == [True, False]
    assert session.save_requested(f"{places[1]}/save", 2)
    assert not session.save_requested("none", 1)
    session.close(leave=True)
    assert not session.save_requested("save", 1), "nothing is open"


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
