"""What `scripts/compat --upstream-tests` makes of a test's results with stock and through us."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compat import upstream


def test_a_test_passes_if_it_does_through_us_and_has_called_us() -> None:
    passed = upstream.Result("passed", "", 2)
    assert upstream.verdict("a", passed, passed).kind == upstream.PASSED
    idle = upstream.Result("passed", "", 0)
    assert upstream.verdict("a", idle, idle).kind == upstream.NOT_OURS


def test_what_stock_fails_or_skips_says_nothing_of_us() -> None:
    failed, skipped = upstream.Result("failed", "no GPU", 0), upstream.Result("skipped", "slow", 0)
    for ours in (failed, upstream.Result("passed", "", 1), None):
        found = upstream.verdict("a", failed, ours)
        assert (found.kind, found.reason) == (upstream.STOCK_FAILS, "no GPU")
        assert upstream.verdict("a", skipped, ours).kind == upstream.SKIPPED
        like_others = upstream.Result("skipped", upstream.NOT_TRIED, 0)
        assert upstream.verdict("a", like_others, ours).kind == upstream.STOCK_FAILS


def test_what_only_fails_through_us_is_a_failure_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "NOT_APPLICABLE", {r"named$": "asserts file names"})
    stock, ours = upstream.Result("passed", "", 0), upstream.Result("failed", "it differs", 1)
    assert upstream.verdict("other", stock, ours).kind == upstream.FAILED
    assert upstream.verdict("other", stock, None).kind == upstream.FAILED
    found = upstream.verdict("named", stock, ours)
    assert (found.kind, found.reason) == (upstream.NOT_OURS, "asserts file names")
    # That it is named does not hide that it passes.
    passed = upstream.Result("passed", "", 1)
    assert upstream.verdict("named", stock, passed).kind == upstream.PASSED


def test_ranks_fail_together_with_the_reason_of_the_first(tmp_path: Path) -> None:
    for rank in range(upstream.RANKS):
        lines = [{"test": "good", "outcome": "passed", "reason": "", "calls": {"save": 1}}]
        if rank:
            lines.append({"test": "cut", "outcome": "passed", "reason": "", "calls": {}})
        bad = rank in (2, 3)
        lines.append(
            {
                "test": "bad",
                "outcome": "failed" if bad else "passed",
                "reason": f"because of {rank}\nand so on" if bad else "",
                "time": 10 - rank,
                "calls": {},
            }
        )
        text = "".join(json.dumps({"rank": rank, **line}) + "\n" for line in lines)
        (tmp_path / f"rank_{rank}.jsonl").write_text(text)
    found = upstream.results(tmp_path)
    assert found["good"] == upstream.Result("passed", "", upstream.RANKS)
    assert found["bad"] == upstream.Result("failed", "because of 3", 0)
    assert found["cut"].outcome == "failed"


def test_parameter_sets_that_fare_alike_are_one_line() -> None:
    passed, failed = upstream.Verdict(upstream.PASSED), upstream.Verdict(upstream.FAILED, "x | y")
    verdicts = {"tests/unit_tests/a.py::t[1]": passed, "tests/unit_tests/a.py::t[2]": passed}
    assert list(upstream.table("tag", {**verdicts, "b.py::u": failed})) == [
        "| tag | a.py::t | 2 | passed |  |",
        "| tag | b.py::u | 1 | FAILED | x / y |",
    ]


def test_only_files_that_import_the_functions_are_run(tmp_path: Path) -> None:
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
