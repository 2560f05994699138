"""Figures of many short waits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tools.gpu_check.report import Report


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` percent of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def spread(values: Sequence[float]) -> str:
    """Return median, 99th percentile and maximum of `values`, which are seconds, as text."""
    shown = (statistics.median(values), percentile(values, 99), max(values))
    return "p50 {:.3f} p99 {:.3f} max {:.3f} ms of {}".format(
        *(1000 * value for value in shown), len(values)
    )


def report_waits(report: Report, what: str, seconds: Sequence[float]) -> None:
    """Report median and maximum of `seconds` as two figures, with percentiles in the first one."""
    if not seconds:
        report.skip(what, "no sample was taken")
        return
    report.figure(f"{what}, p50", 1000 * statistics.median(seconds), "ms", spread(seconds))
    report.figure(f"{what}, max", 1000 * max(seconds), "ms")
