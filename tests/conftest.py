"""Settings for all tests: no test reads the developer's own configuration."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# Property tests judge results, not speed: machines that run them are shared.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# Keep the bytecode of the package and the tests, whatever the machine is set to: each rank process
# would compile about 150 modules again, which takes 0.25 s of CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FLASHCKPT_"):
            monkeypatch.delenv(name)
