"""Verdicts of `scripts/compat --upstream-tests` on a test that ran with stock and with ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compat import upstream


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


def test_one_failed_rank_fails_the_test_with_the_reason_of_the_first(tmp_path: Path) -> None:
    for rank in range(upstream.RANKS):
        lines = [{"test": "good", "outcome": "passed", "reason": "", "calls": {"save": 1}}]
        if rank:
            lines.append({"test": "cut", "outcome": "passed", "reason": "", "calls": {}})
        failed = rank in (2, 3)
        lines.append(
            {
                "test": "bad",
                "outcome": "failed" if failed else "passed",
                "reason": f"because of {rank}\nand so on" if failed else "",
                "time": 10 - rank,
                "calls": {},
            }
        )
        text = "".join(json.dumps({"rank": rank, **line}) + "\n" for line in lines)
        (tmp_path / f"rank_{rank}.jsonl").write_text(text)
    results = upstream.results(tmp_path)
    assert results["good"] == upstream.Result("passed", "", upstream.RANKS)
    assert results["bad"] == upstream.Result("failed", "because of 3", 0)
    assert results["cut"].outcome == "failed"


def test_the_table_merges_parameter_sets_with_the_same_verdict() -> None:
    passed, failed = upstream.Verdict(upstream.PASSED), upstream.Verdict(upstream.FAILED, "x | y")
    verdicts = {"tests/unit_tests/a.py::t[1]": passed, "tests/unit_tests/a.py::t[2]": passed}
    assert list(upstream.table("tag", {**verdicts, "b.py::u": failed})) == [
        "| tag | a.py::t | 2 | passed |  |",
        "| tag | b.py::u | 1 | FAILED | x / y |",
    ]


def test_only_files_that_import_save_or_load_are_run(tmp_path: Path) -> None:
    folder = tmp_path / "tests/unit_tests/sub"
    folder.mkdir(parents=True)
    for name, text in {
        "test_yes.py": "from megatron.training.checkpointing import save_checkpoint",
        "test_other.py": "from megatron.training.checkpointing import read_metadata",
        "test_own.py": "def save_checkpoint(): ...",
        "no_test.py": "from megatron.training.checkpointing import save_checkpoint",
    }.items():
        (folder / name).write_text(text)
    assert upstream.files(tmp_path) == ["tests/unit_tests/sub/test_yes.py"]
