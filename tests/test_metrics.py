"""Metrics that training code reports for its next checkpoint."""

from __future__ import annotations

import msgspec
import pytest

from megatron_flashckpt import report_metric
from megatron_flashckpt.metrics import reported


def test_a_metric_must_be_a_number(caplog: pytest.LogCaptureFixture) -> None:
    report_metric("loss", msgspec.json.decode("2.5"))
    report_metric("accuracy", 1)
    report_metric("loss", float("nan"))
    try:
        assert reported == {"accuracy": 1.0}
        assert "'loss' is nan" in caplog.text
    finally:
        reported.clear()
