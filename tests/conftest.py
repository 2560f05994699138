"""Settings for all tests: no test reads the developer's own configuration."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FLASHCKPT_"):
            monkeypatch.delenv(name)
