"""Settings for all tests: no test reads the developer's own configuration."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# Property tests check results, not speed, because they run on shared machines.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# Keep the bytecode of package and tests, whatever the machine's settings: otherwise every rank
# process compiles about 150 modules again, which takes 0.25 s of CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_xdist_auto_num_workers() -> int:
    """Return the workers of `-n auto`: more than cores, because tests wait for processes."""
    return 1 + len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FLASHCKPT_"):
            monkeypatch.delenv(name)
