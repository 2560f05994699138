"""Faults that are known and not mended. A test that passes ends its `xfail`."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.catalog import retention
from megatron_flashckpt.config import Retention
from megatron_flashckpt.file_format.manifest import CommitFacts
from tests.support.trainer import new_save_id


def commit_of(iteration: int, hours_ago: float) -> CommitFacts:
    return CommitFacts(
        iteration=iteration,
        save_id=new_save_id(),
        committed_at=time.time() - 3600 * hours_ago,
    )


@pytest.mark.xfail(strict=True, reason="ages compare clocks of hosts")
@pytest.mark.parametrize("hours", [100, -100], ids=["agent's clock", "clock of the commits"])
def test_a_wrong_clock_removes_no_young_checkpoint(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """The agent started while its clock was ahead, or earlier commits were made with a late one."""
    steady = time.clock_gettime(time.CLOCK_BOOTTIME)
    ahead = max(hours, 0)
    wall = time.time() + 3600 * ahead
    monkeypatch.setattr(retention, "_STARTED", (wall, steady))
    monkeypatch.setattr(retention, "time", SimpleNamespace(time=lambda: wall, **_clocks()))
    commits = [
        commit_of(2, 1.0 - min(hours, 0)),
        commit_of(4, 0.5 - min(hours, 0)),
        commit_of(6, 0),
    ]
    kept = retention.why_kept(
        commits,
        Retention(max_age_hours=24),
        retain_interval=None,
        tracked=6,
        previous=4,
        now=retention.steady_time(),
    )
    assert [iteration for iteration, reasons in kept.items() if not reasons] == []


def _clocks() -> dict[str, Any]:
    return {"clock_gettime": time.clock_gettime, "CLOCK_BOOTTIME": time.CLOCK_BOOTTIME}
