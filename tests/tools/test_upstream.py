"""Verdicts of `scripts/compat --upstream-tests` on a test that ran with stock and with ours."""

from __future__ import annotations

import pytest

from tools.compat import upstream


def test_a_test_counts_as_passed_only_if_it_called_our_functions() -> None:
    passed = upstream.Result("passed", "", 2)
    assert upstream.verdict("a", passed, passed).kind == upstream.PASSED
    idle = upstream.Result("passed", "", 0)
    assert upstream.verdict("a", idle, idle).kind == upstream.NOT_OURS


def test_a_test_that_stock_fails_or_skips_is_no_failure_of_ours() -> None:
    failed, skipped = upstream.Result("failed", "no GPU", 0), upstream.Result("skipped", "slow", 0)
    for ours in (failed, upstream.Result("passed", "", 1), None):
        verdict = upstream.verdict("a", failed, ours)
        assert (verdict.kind, verdict.reason) == (upstream.STOCK_FAILS, "no GPU")
        assert upstream.verdict("a", skipped, ours).kind == upstream.SKIPPED
        not_tried = upstream.Result("skipped", upstream.NOT_TRIED, 0)
        assert upstream.verdict("a", not_tried, ours).kind == upstream.STOCK_FAILS


def test_a_test_that_only_ours_fails_is_a_failure_or_a_listed_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "NOT_APPLICABLE", {r"named$": "asserts file names"})
    stock, ours = upstream.Result("passed", "", 0), upstream.Result("failed", "it differs", 1)
    assert upstream.verdict("other", stock, ours).kind == upstream.FAILED
    assert upstream.verdict("other", stock, None).kind == upstream.FAILED
    verdict = upstream.verdict("named", stock, ours)
    assert (verdict.kind, verdict.reason) == (upstream.NOT_OURS, "asserts file names")
    # A listed test that passes still counts as passed.
    passed = upstream.Result("passed", "", 1)
    assert upstream.verdict("named", stock, passed).kind == upstream.PASSED
