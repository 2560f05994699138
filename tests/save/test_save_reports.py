"""Reports of saves: one log line per event for 1,024 ranks, and the verdict at the end of a job."""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.config import Config
from megatron_flashckpt.save.save_reports import SaveReports
from megatron_flashckpt.save.slot_acquisition import SlotAcquisition

RANKS, PER_NODE = 1024, 8
ERROR = f"/ckpt/iter_0000008/rank_00017-0.safetensors: {'cannot write; ' * 18}free some space"


def outcome(
    iteration: int, error: str | None = None, failed: tuple[int, ...] = (), *, held: bool = False
) -> Outcome:
    return Outcome(iteration, f"id{iteration}", error, 1.5, failed_ranks=failed, held=held)


def on_all_ranks(report: Callable[[SaveReports], None]) -> list[SaveReports]:
    """Report the same event on every rank; return the reports."""
    jobs = [SaveReports("/ckpt", rank) for rank in range(RANKS)]
    for job in jobs:
        job.requested(8)
        report(job)
    return jobs


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno > logging.DEBUG]


@pytest.fixture(autouse=True)
def _every_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


@pytest.mark.parametrize("all_fail", [False, True])
def test_rank_0_logs_an_error_and_so_does_one_failed_rank_per_node(
    all_fail: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def report(job: SaveReports) -> None:
        first = job.rank // PER_NODE * PER_NODE
        failed = tuple(range(first, first + PER_NODE)) if all_fail else (17,) if first == 16 else ()
        job.failed(outcome(8, ERROR, failed))

    on_all_ranks(report)
    of_0, *others = lines(caplog)
    if all_fail:
        assert len(others) == RANKS // PER_NODE - 1
        likewise = " (likewise rank 9, 10, 11, 12, 13, 14, 15)"
        assert others[0] == f"rank 8: iteration 8 was not saved: {ERROR}{likewise}"
    else:
        where = "there is no durable checkpoint in /ckpt"
        assert of_0 == f"rank 0: iteration 8 was not saved: {ERROR}; {where}"
        assert others == [f"rank 17: iteration 8 was not saved: {ERROR}"]
        assert len(caplog.records) == RANKS, "the other ranks log debug messages"


def test_only_rank_0_reports_a_save_as_durable_kept_or_skipped(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    on_all_ranks(lambda job: job.committed(outcome(8)))
    on_all_ranks(lambda job: job.kept(outcome(8)))
    on_all_ranks(lambda job: job.skipped(8, "busy"))
    assert capsys.readouterr().out.splitlines() == [
        "  flashckpt: iteration 8 durable after 1.500 s",
        "  flashckpt: iteration 8 kept in host memory, not in storage, after 1.500 s",
    ]
    assert lines(caplog) == ["iteration 8 is not saved: busy"]


def test_only_rank_0_says_once_that_a_save_waits_for_a_slot(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed, put_back = outcome(6, ERROR), []
    for rank in range(3):
        answers = iter([-1, -1, -1, 1])
        client = SimpleNamespace(acquire=lambda *_: next(answers))  # noqa: B023
        link: Any = SimpleNamespace(client=lambda: client)  # noqa: B023
        saves: Any = SimpleNamespace(poll=lambda: [failed], put_back=put_back.append)
        slots = SlotAcquisition("/ckpt", rank, 3, Config(), link, saves)
        assert slots._granted(8, may_skip=False) == 1
    assert capsys.readouterr().out == (
        "  flashckpt: iteration 8 waits for a free slot, because earlier saves are still being "
        "written\n"
    )
    assert put_back == [[failed]] * 9, "outcomes that come meanwhile are reported later"


def test_the_last_save_decides_the_verdict_of_a_job() -> None:
    job = SaveReports("/ckpt", 0)
    job.note_durable(2)
    assert job.last_failure() is None
    job.requested(4)
    job.failed(outcome(4, "no space"))
    assert job.last_failure() == (
        "the last save, iteration 4, is not durable: no space; the newest durable checkpoint in "
        "/ckpt is iteration 2"
    )
    job.requested(6)
    job.committed(outcome(6))
    assert job.last_failure() is None
    job.requested(8)
    job.requested(10)
    job.committed(outcome(8))
    job.failed(outcome(10, "hung"))
    assert (job.last_failure() or "").endswith("checkpoint in /ckpt is iteration 8")
    job.failed(outcome(8, "of an earlier save"))
    assert "is not durable: hung; " in (job.last_failure() or "")


def test_an_error_names_host_and_path_of_the_agents_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reports = SaveReports(str(tmp_path), 0)
    reports.note_agent_log(str(tmp_path / "run"))
    reports.requested(8)
    reports.failed(outcome(8, ERROR, (0,)))
    (message,) = caplog.messages
    assert re.search(
        rf"; the agent's log: {platform.node()}:{tmp_path}/run/agent-[-\w]{{33}}\.log$", message
    )


def test_failures_in_a_row_say_what_is_at_risk_and_where_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = SaveReports("/ckpt", 0)
    job.note_durable(20)
    for iteration in range(30, 71, 10):
        job.requested(iteration)
        job.failed(outcome(iteration, "no space", held=True))
    first, *_, fifth = lines(caplog)
    assert "in a row" not in first
    assert first.endswith("; host memory holds iteration 30 as long as the agents run")
    assert fifth.endswith(
        "; the newest durable checkpoint in /ckpt is iteration 20; host memory holds iteration 70 "
        "as long as the agents run; 5 saves in a row, 50 iterations at risk"
    )
    assert job.is_held
    job.committed(outcome(80))
    job.requested(90)
    job.failed(outcome(90, "a rank has no memory"))
    assert not job.is_held
    assert lines(caplog)[-1].endswith("is iteration 80")
