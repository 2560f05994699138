"""`python -m benchmarks train --gpu`: its forked ranks and one real run, on a CPU."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.train import gpu, report, starts
from benchmarks.train.systems import HANGING, environment_of_one_rank
from tests.support.trainer import eventually
from tools.gpu_check.forkserver import forkserver

REPO = Path(__file__).resolve().parents[1]
PRINTS = "import os, sys; print(os.environ['NAME'], os.getcwd(), *sys.argv[1:]); sys.exit(3)"


@pytest.fixture(scope="module")
def start() -> Iterator[starts.Start]:
    with forkserver(starts.IMPORTED, environment_of_one_rank(on_cpu=True)) as (found, _):
        assert found["forks"]
        yield starts.forked


def command(tmp_path: Path, script: str, *arguments: str) -> list[str]:
    (tmp_path / "script.py").write_text(script)
    return [sys.executable, str(tmp_path / "script.py"), *arguments]


def env_of(**more: str) -> dict[str, str]:
    return {"PYTHONPATH": str(REPO), **more}


def test_a_forked_rank_is_as_a_new_process_with_megatron_imported(
    start: starts.Start, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    script = f"{PRINTS[:-13]}; print('megatron.training.training' in sys.modules); sys.exit(3)"
    env = env_of(NAME="a rank")
    rank = start(command(tmp_path, script, "--flag", "1"), env, tmp_path, output)
    assert rank.wait() == rank.poll() == rank.returncode == 3
    assert output.read_text().split("\n")[:2] == [f"a rank {tmp_path} --flag 1", "True"]
    new = starts.new_process(command(tmp_path, PRINTS), {**os.environ, **env}, tmp_path, output)
    assert new.wait() == 3
    assert f"a rank {tmp_path}\n" in output.read_text()


def test_a_forked_rank_has_a_process_group_and_is_killed(
    start: starts.Start, tmp_path: Path
) -> None:
    waits = command(tmp_path, "import time; time.sleep(1000)")
    rank = start(waits, env_of(), tmp_path, tmp_path / "output")
    eventually("a process group", lambda: os.getpgid(rank.pid) == rank.pid)
    assert rank.poll() is None
    rank.kill()
    assert rank.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(rank.pid)


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
