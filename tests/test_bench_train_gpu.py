"""`python -m benchmarks train --gpu`: one real run of forked ranks, on a CPU."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from benchmarks.train import gpu, report
from benchmarks.train.systems import HANGING

REPO = Path(__file__).resolve().parents[1]


def test_a_quick_study_has_a_row_for_ours_and_one_for_a_peer_that_hangs(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    arguments = ["--gpu", "--quick", "--systems", "flashckpt", "hangs", "--json", str(file)]
    # Short: the path of an agent's socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="b") as short:
        scratch = Path(short) / "s"
        scratch.mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", "train", *arguments, "--dir", str(scratch)],
            env={**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": short},
            cwd=REPO,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert not list(scratch.iterdir())
    assert done.returncode == 0, done.stdout + done.stderr
    (figures,) = report.read_figures(file)
    assert figures["forked"], done.stdout
    systems = figures["systems"]
    assert systems["flashckpt"]["failed"] is None
    assert {*gpu.COLUMNS} <= systems["flashckpt"]["figures"].keys()
    assert systems[HANGING.name]["failed"].startswith(
        "took too long: it did not end\n  waiting for process"
    )
    hidden = int(systems[HANGING.name]["failed"].split()[-1])
    assert not psutil.pid_exists(hidden)


def test_a_study_on_a_gpu_needs_one(tmp_path: Path) -> None:
    options = argparse.Namespace(size="usual", budget=1.0, systems=None)
    with pytest.raises(SystemExit, match="torch sees no GPU"):
        next(gpu.run(options, tmp_path))
