"""`scripts/bench save --quick` measures and reports. What it measures is no test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
MEASURED = (
    *("blocked_s", "settled_s", "complete_s", "owed_s", "durable_s", "memcpy_s", "cpu_s"),
    *("cold_s", "warm_s"),
)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """What `--quick` prints and writes of a state of 2 MiB on one rank."""
    where = tmp_path_factory.mktemp("bench")
    size = "--quick --mib 2 --pieces 100 --ranks 1 --saves 1 --step-ms 5".split()
    paths = ["--dir", str(where), "--json", str(where / "figures.json")]
    done = subprocess.run(
        [sys.executable, str(REPO / "scripts/bench.py"), "save", *size, *paths],
        env={**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(where)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((where / "figures.json").read_text())


def test_ours_and_torch_save_are_measured_without_an_error(quick: tuple[str, dict]) -> None:
    _, figures = quick
    for name in ("flashckpt", "torch.save"):
        found = figures["systems"][name]
        assert found["errors"] == []
        assert set(MEASURED) <= found.keys()
        assert all(len(found[key]) == 1 and found[key][0] >= 0 for key in MEASURED)
        assert found["first"].keys() >= {"blocked_s", "durable_s"}
        assert found["disk_nbytes"] >= figures["rank_nbytes"] > 0
    ours = figures["systems"]["flashckpt"]
    assert ours["busy"]["said"] == ["saved"] * 3
    assert ours["busy"]["latest"] == 3
    assert {"training_lost_s", "memory_s", "agent_nbytes", "agent_start_s"} <= ours.keys()
    assert {"raw_direct_s", "raw_buffered_s", "read_cold_s", "read_warm_s"} <= (
        figures["limits"].keys()
    )


def test_a_system_that_is_not_installed_is_named_with_what_to_install(
    quick: tuple[str, dict],
) -> None:
    printed, figures = quick
    if "dlrover" in figures["systems"]:
        pytest.skip("DLRover is installed")
    assert "dlrover==0.6.1" in figures["left_out"]["dlrover"]
    assert "dlrover==0.6.1" in printed


def test_the_report_compares_with_the_targets(quick: tuple[str, dict]) -> None:
    printed, _ = quick
    assert "first save against later ones" in printed
    assert "torch.save per rank" in printed
