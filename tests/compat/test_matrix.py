"""What `scripts/compat` makes of the results of its runs: marks, the table, where it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compat import matrix as compat


def fails(error: Exception) -> Any:
    def feature(_: Any) -> None:
        raise error

    return feature


def features(monkeypatch: pytest.MonkeyPatch, **them: Any) -> None:
    monkeypatch.setattr(compat, "FEATURES", {"first": lambda _: None, **them})


def test_marks_say_what_works_and_notes_why_not(monkeypatch) -> None:
    features(
        monkeypatch,
        second=lambda _: None,
        broken=fails(compat.CellError("differs; log: /somewhere/A.log")),
        absent=fails(compat.NotHereError("is too old")),
    )
    found = compat.try_all(None, "v1", "abc of 2026-01-01", lambda: None)
    assert list(found.marks.values()) == [compat.TICK, compat.TICK, compat.CROSS, compat.NONE]
    assert found.failed == 1
    lines = list(compat.table([found]))
    assert "v1 (abc of 2026-01-01)" in lines[0]
    assert f"| broken | {compat.CROSS} |" in lines
    assert lines[-2:] == ["- v1, broken: differs", "- v1, absent: is too old"]


def test_without_stock_nothing_is_said_of_the_rest(monkeypatch) -> None:
    features(monkeypatch, second=fails(compat.CellError("no")), third=lambda _: None)
    found = compat.try_all(None, "v1", "abc", lambda: None)
    assert list(found.marks.values()) == [compat.TICK, compat.CROSS, compat.NONE]


def test_the_table_takes_the_place_of_the_one_before(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compat, "README", tmp_path / "README.md")
    compat.README.write_text(f"before\n{compat.BEGIN}old\n{compat.FINISH}after\n")
    compat.write_readme(["| new |"])
    expected = f"before\n{compat.BEGIN}| new |\n{compat.FINISH}after\n"
    assert compat.README.read_text() == expected


def test_the_readme_has_a_place_for_the_table() -> None:
    before, begin, rest = compat.README.read_text().partition(compat.BEGIN)
    assert begin
    assert compat.FINISH in rest
    assert compat.BEGIN not in rest + before


@pytest.mark.parametrize("works", [True, False])
def test_a_release_that_passed_is_not_tried_again(monkeypatch, tmp_path: Path, works: bool) -> None:
    tried = []

    def second(_: Any) -> None:
        tried.append("second")
        if not works:
            raise compat.CellError("no")

    features(monkeypatch, second=second)
    monkeypatch.setitem(compat.TAGS, "v1", "abc")
    monkeypatch.setattr(compat, "_revision", lambda *_: "abc")
    monkeypatch.setattr(compat, "Release", lambda *_: None)

    def extract(tag: str, where: Path, _: Path) -> Any:
        (where / tag).mkdir(parents=True)
        return compat.Tree(tag, where / tag / "tree")

    monkeypatch.setattr(compat, "extract", extract)
    first, again = (compat.column("v1", tmp_path, tmp_path, lambda: None) for _ in range(2))
    assert first == again
    assert tried == ["second"] * (1 if works else 2)
