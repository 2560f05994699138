"""Verdicts of `scripts/compat --upstream-tests` on a test that ran with stock and with ours."""

from __future__ import annotations

import pytest

from tools.compat import upstream


def result(outcome: str, reason: str = "", calls: int = 0) -> upstream.Result:
    return upstream.Result(outcome, reason, calls)


PASSED, FAILED, SKIPPED = result("passed", "", 1), result("failed", "no GPU"), result("skipped")


@pytest.mark.parametrize(
    ("name", "stock", "ours", "kind"),
    [
        ("a", PASSED, PASSED, upstream.PASSED),
        ("a", result("passed"), result("passed"), upstream.NOT_OURS),  # called none of ours
        *(("a", FAILED, ours, upstream.STOCK_FAILS) for ours in (FAILED, PASSED, None)),
        *(("a", SKIPPED, ours, upstream.SKIPPED) for ours in (FAILED, PASSED, None)),
        ("a", result("skipped", upstream.NOT_TRIED), PASSED, upstream.STOCK_FAILS),
        *(("a", PASSED, ours, upstream.FAILED) for ours in (FAILED, None)),
        ("named", PASSED, FAILED, upstream.NOT_OURS),
        ("named", PASSED, PASSED, upstream.PASSED),  # a listed test that passes still counts
    ],
)
def test_only_what_ours_alone_fails_is_a_failure_or_a_listed_exception(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    stock: upstream.Result,
    ours: upstream.Result | None,
    kind: str,
) -> None:
    monkeypatch.setattr(upstream, "NOT_APPLICABLE", {r"named$": "asserts file names"})
    verdict = upstream.verdict(name, stock, ours)
    assert verdict.kind == kind
    if kind == upstream.STOCK_FAILS and stock is FAILED:
        assert verdict.reason == "no GPU"
    if (name, kind) == ("named", upstream.NOT_OURS):
        assert verdict.reason == "asserts file names"
