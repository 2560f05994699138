"""A terminal of a given width, in place of the captured output of a command."""

from __future__ import annotations

import sys

import pytest


def pretend(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Let commands of this test take stdout for a terminal with lines of `columns` characters.

    The test must capture stdout already (`capsys`).
    """
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    # A terminal without styles; Rich takes its size only from both variables together.
    for name, value in {"TERM": "dumb", "COLUMNS": str(columns), "LINES": "50"}.items():
        monkeypatch.setenv(name, value)
