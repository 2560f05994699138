"""Settings that differ between the ranks of a job: one error on all ranks, and no rank waits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.megatron_jobs import Result, run_cases

RANKS = 2
REMEDY = "; give all nodes the same settings file and the same FLASHCKPT_* variables"
#: name -> (settings of rank 1, the job's first call, whether it saves, the differences that the
#: error names)
CASES: dict[str, tuple[dict[str, Any], str, bool, str]] = {
    "a job that only loads": (
        {"damaged": "stop", "share_reads": "never"},
        "load",
        False,
        "'damaged' is fall_back on rank 0, stop on rank 1; "
        "'share_reads' is auto on rank 0, never on rank 1",
    ),
    # With `busy: skip`, only saves that are not waited for have a collective.
    "a job that waits for saves": (
        {"redundancy_group": 2, "wait": "durable"},
        "load",
        True,
        "'redundancy_group' is 8 on rank 0, 2 on rank 1; 'wait' is none on rank 0, durable on "
        "rank 1",
    ),
    "a job without a load": (
        {"redundancy": "copy"},
        "train",
        True,
        "'redundancy' is none on rank 0, copy on rank 1",
    ),
}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    where = tmp_path_factory.mktemp("settings")
    cases = [
        {
            "name": name,
            "call": call,
            "args": {"load": str(where), **({"save": str(where / "save")} if saves else {})},
            "config_on": {"1": settings},
        }
        for name, (settings, call, saves, _) in CASES.items()
    ]
    flags = "--num-layers 1 --train-iters 2 --distributed-timeout-minutes 1".split()
    return run_cases(where, "cases", flags, cases, ranks=RANKS)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_refuse_settings_that_differ(result: Result, name: str) -> None:
    expected = f"settings differ between ranks: {CASES[name][3]}{REMEDY}"
    for event in result.named(name):
        assert event["error"] == ["ConfigError", expected]
    assert len(result.named(name)) == RANKS
