"""Figures that `flashckpt report` and `plan --measured` take from a history."""

from __future__ import annotations

import msgspec
import pytest

from megatron_flashckpt.catalog.measured_job import MeasuredJob, measured
from tests.support.histories import GB, history, run_of_saves


def test_a_history_tells_pace_and_interruptions() -> None:
    job = measured(history(3))
    assert job == MeasuredJob(
        iteration_s=2.0,
        blocked_s=0.1,
        durable_s=5.0,
        nbytes_per_s=1.6 * GB,
        nbytes=8 * GB,
        interval_iterations=50,
        world_size=16,
        trained_s=4 * (10 + 2 * 150),
        interruptions=3,
    )
    assert job is not None
    assert job.mtbf_s == pytest.approx(4 * 310 / 3)


def test_starts_before_the_oldest_timed_run_count_for_nothing() -> None:
    """A history keeps as many starts as saves, which are more frequent."""
    old = [run_of_saves(number, 0.0, range(0), "storage")[0] for number in range(1, 30)]
    job = measured([*old, *run_of_saves(30, 1e6, range(50, 201, 50), "storage")])
    assert job is not None
    assert job.interruptions == 0


def test_what_the_history_cannot_tell_is_none() -> None:
    two = measured(history(2))
    assert two is not None
    assert two.mtbf_s is None, "two interruptions tell no mean distance"
    past = history(1)
    assert measured(past[:2]) is None, "one save has no distance to another"
    assert measured([past[1], past[1]]) is None, "an agent that replaced another wrote it twice"
    untimed = msgspec.structs.replace(past[2], cost=None)
    assert measured([*past[:2], untimed]) is None


def test_a_run_resumed_at_an_earlier_iteration_gives_no_negative_step() -> None:
    past = run_of_saves(1, 0.0, range(50, 201, 50), "scratch")
    job = measured([*past, *run_of_saves(2, 1e3, range(100, 201, 50), "storage")])
    assert job is not None
    assert (job.iteration_s, job.interval_iterations) == (2.0, 50)
