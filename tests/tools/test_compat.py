"""Marks of the release matrix: how they are set, stored between calls, and printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked.nursery import REPO
from tools.compat import matrix
from tools.compat.matrix import CROSS, NONE, TICK, Column, Trial
from tools.compat.release import CellError, NotHereError

TAG = "core_v0.17.1"
#: A script that prints the log lines of a training run and saves nothing.
PRETRAIN = """
for iteration in range(1, 7):
    print(f" iteration {iteration:8d}/       6 | lm loss: 1.0E+00 | grad norm: 2.0 | end")
"""


def works(_: Any) -> None: ...


def fails(error: Exception) -> Callable[[Any], None]:
    def feature(_: Any) -> None:
        raise error

    return feature


def tried(monkeypatch: pytest.MonkeyPatch, **features: Callable[[Any], str | None]) -> Column:
    """Return the marks and notes of a release that has only `features`."""
    monkeypatch.setattr(matrix, "FEATURES", features)
    column = Column("v1", "abc of 2026-01-01", "2026-01-02", {}, [])
    trial = Trial(object(), column)  # type: ignore[arg-type]
    for feature in features:
        try:
            trial.check(feature)
        except (Exception, pytest.skip.Exception):
            assert column.marks[feature] != TICK
    return column


def test_marks_show_what_works_and_notes_explain_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    column = tried(
        monkeypatch,
        first=works,
        second=lambda _: "with a remark",
        broken=fails(CellError("differs; log: /somewhere/A.log")),
        crashing=fails(KeyError("name")),
        absent=fails(NotHereError("is too old")),
        unasked=fails(NotHereError("")),
    )
    assert list(column.marks.values()) == [TICK, TICK, CROSS, CROSS, NONE, NONE]
    assert not column.is_whole
    lines = list(matrix.table([column]))
    assert "v1 (abc of 2026-01-01)" in lines[0]
    assert f"| broken | {CROSS} |" in lines
    assert lines[-4:] == [
        "- v1, second: with a remark",
        "- v1, broken: differs",
        "- v1, crashing: KeyError: 'name'",
        "- v1, absent: is too old",
    ]


def test_each_feature_of_a_release_is_a_test(tmp_path: Path) -> None:
    """The release saves nothing, so all features but the first fail or are not tried."""
    clone, keep = tmp_path / "clone", tmp_path / "keep"
    (clone / "megatron/training").mkdir(parents=True)
    for package in ("megatron", "megatron/training"):
        (clone / package / "__init__.py").touch()
    (clone / "pretrain_gpt.py").write_text(PRETRAIN)
    author = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    for command in (["init"], ["add", "."], [*author, "commit", "-m", "made"], ["tag", TAG]):
        subprocess.run(["git", *command], cwd=clone, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-m", "tools.compat", TAG, "--keep", str(keep)],
        cwd=REPO,
        env={**os.environ, "MEGATRON_LM": str(clone)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    first, second, *others = matrix.FEATURES
    ids = "tools/compat/test_releases.py::test_a_feature_works_with_a_release"
    for feature, outcome in ((first, "PASSED"), (second, "FAILED"), (others[-1], "SKIPPED")):
        assert f"{ids}[{TAG}-{feature}] {outcome}" in done.stdout, done.stdout
    column = Column(**json.loads((keep / TAG / "column.json").read_text()))
    assert list(column.marks.values()) == [TICK, CROSS, *[NONE] * len(others)]
    assert f"\n| {first} | {TICK} |\n| {second} | {CROSS} |\n" in done.stdout
    assert f"- {column.notes[0].partition('; log: ')[0]}\n" in done.stdout
