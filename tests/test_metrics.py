"""Metrics that training code reports for its next checkpoint."""

from __future__ import annotations

import msgspec
import pytest

from megatron_flashckpt import report_metric
from megatron_flashckpt.metrics import Metrics, reported


def test_a_metric_counts_for_one_checkpoint_and_must_be_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics()
    metrics.report("loss", msgspec.json.decode("2.5"))
    metrics.report("accuracy", 1)
    metrics.report("loss", float("nan"))
    assert metrics.current() == {"accuracy": 1.0}
    assert "'loss' is nan" in caplog.text
    metrics.clear()
    assert metrics.current() == {}


def test_the_public_function_reports_to_the_saves_of_this_process() -> None:
    report_metric("a metric of a test", 0.25)
    try:
        assert reported.current()["a metric of a test"] == 0.25
    finally:
        reported.clear()
