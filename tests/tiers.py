"""The two tiers of the suite: `scripts/test` runs the first one, `scripts/test --all` both.

The first tier has all units, and the main job on real Megatron: saves, SIGKILL and resume from
memory and from storage, another layout, a conversion to stock and back, launcher and patch, failed
saves, lying files. The second tier has further models, flags, layouts and faults, and most tests
that wait for real agents.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

#: Folders below tests/ in the second tier, but for the files in `FIRST`.
FOLDERS = ("faulty_storage", "integration", "tools")
FIRST = (
    "integration/test_bad_input.py",
    "integration/test_entry_points.py",
    "integration/test_equal_settings.py",
    "integration/test_failures.py",
    "integration/test_memory_relayout.py",
    "integration/test_patches.py",
    "integration/test_resume.py",
    "tools/test_crash.py",
)
#: Files of other folders in the second tier.
SECOND = (
    "agent/peers/test_failures.py",
    "agent/peers/test_recovery.py",
    "agent/test_departed_ranks.py",
    "agent/test_drain.py",
    "agent/test_faulty_storage.py",
    "agent/test_foreground.py",
    "agent/test_forks.py",
    "agent/test_gpu_ranks.py",
    "agent/test_local_copies.py",
    "agent/test_object_store.py",
    "agent/test_real_faults.py",
    "agent/test_resources.py",
    "agent/test_save_requests.py",
    "agent/test_second_attempt.py",
    "agent/test_second_start.py",
    "agent/test_succession.py",
    "agent/test_survival.py",
    "agent/test_trace_files.py",
    "agent/test_write_limits.py",
    "cli/test_config_check.py",
    "cli/test_convert_urls.py",
    "cli/test_object_urls.py",
    "convert/test_hf_training.py",
    "convert/test_kinds_of_models.py",
    "convert/test_memory.py",
    "convert/test_more_models.py",
    "hostile/test_fuzz.py",
    "load/test_large_worlds.py",
    "load/test_replica_sharing.py",
    "storage/test_object_store.py",
    "test_bench.py",
    "test_bench_train_gpu.py",
    "test_bench_train_jobs.py",
    "test_install.py",
    "test_lint.py",
)
#: Files and folders whose tests start jobs of a minute. Workers begin with them.
LONG = ("integration", "convert/test_more_models.py", "tools")


def only_first(values: Iterable[Any]) -> list[Any]:
    """Return values for `parametrize`, or for a fixture, of which only the first is in tier one."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.second_tier) for value in others)]


def _is_in(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}/") for place in places)


def is_second(file: str) -> bool:
    """Return whether the tests of `file`, a path below tests/, are in the second tier.

    The marker `second_tier` adds single tests of other files.
    """
    return file in SECOND or (_is_in(file, FOLDERS) and file not in FIRST)


def is_long(file: str) -> bool:
    """Return whether tests of `file`, a path below tests/, start long jobs."""
    return _is_in(file, LONG)
