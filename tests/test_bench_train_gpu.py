"""`python -m benchmarks train --gpu`: its forked ranks, its time limit and its rows, on a CPU."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.train import report, starts, study
from benchmarks.train.job import JobError, Megatron
from benchmarks.train.measure import Measured
from benchmarks.train.series import Budget, Series
from benchmarks.train.systems import System, environment_of_one_rank
from tests.support.processes import run_within
from tests.support.trainer import eventually
from tests.test_bench_train import NONE, OTHER, OURS, SCHEDULE, FakeSession, saving
from tools.gpu_check.forkserver import forkserver

REPO = Path(__file__).resolve().parents[1]
PRINTS = "import os, sys; print(os.environ['NAME'], os.getcwd(), *sys.argv[1:]); sys.exit(3)"

# ---------------------------------------------------------------------- forked ranks


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


# ---------------------------------------------------------------------- rounds in a limited time


def run_rounds(session: FakeSession, budget: Budget, rounds: int) -> Series:
    all_systems = [OURS, NONE, OTHER]
    megatron = Megatron(Path(), (), {}, Path())
    series = Series(all_systems, {"installed": megatron}, SCHEDULE, budget)
    for number in range(rounds):
        session.restarts = number == 0
        series.round(session, number)
    return series


def test_a_limited_study_begins_each_round_with_the_run_without_saves() -> None:
    session = FakeSession(saving)
    series = run_rounds(session, Budget(1000.0, 1.0), 3)
    rounds = [session.order[at : at + 3] for at in (0, 3, 6)]
    assert [order[0] for order in rounds] == ["none"] * 3
    assert len({tuple(order) for order in rounds}) > 1, "the others take turns"
    assert series.most_rounds == 3


def test_a_run_that_would_not_end_in_time_is_left_out() -> None:
    budget = Budget(1000.0, 1.0)

    def measured(system: System) -> Measured:
        if system is OURS:
            # Nothing ends in time any more.
            budget.ends_at = time.monotonic()
        return saving(system)

    session = FakeSession(measured)
    series = run_rounds(session, budget, 2)
    assert session.order == ["none", "flashckpt"]
    systems = series.figures()["systems"]
    assert systems["other"]["failed"] == "not run: no time was left"
    assert systems["flashckpt"]["failed"] is None
    assert series.errors == []


def test_a_run_takes_as_long_as_the_last_of_its_kind() -> None:
    budget = Budget(100.0, 10.0)
    assert budget.has_time("a system")
    budget.took("a system", 200.0)
    assert not budget.has_time("a system")
    assert budget.has_time("another")


def test_an_interrupted_round_keeps_its_results() -> None:
    def measured(system: System) -> Measured:
        if system is OTHER:
            raise SystemExit(1)
        return saving(system)

    all_systems = [NONE, OURS, OTHER]
    series = Series(all_systems, {"installed": Megatron(Path(), (), {}, Path())}, SCHEDULE)
    with pytest.raises(SystemExit):
        series.round(FakeSession(measured), 0)
    assert len(series.figures()["systems"]["flashckpt"]["rounds"]) == 1


# ---------------------------------------------------------------------- rows


def figures_with_a_hang() -> dict:
    def measured(system: System) -> Measured:
        if system is OTHER:
            raise JobError("took too long: it did not end\n  waiting for process 12")
        return saving(system)

    series = run_rounds(FakeSession(measured), Budget(1000.0, 1.0), 1)
    machine = {"cpu": "a CPU", "cores": 2, "memory_gib": 4.0, "file_system": "ext4", "kernel": "6"}
    return {
        "ranks": 1,
        "rounds": series.most_rounds,
        "started": "today",
        "seconds": 60,
        "size": "0.4b",
        "schedule": {"interval": 5, "saves": 4},
        "machine": {**machine, "gpu": "a card, driver 1", "versions": {"torch": "2"}},
        "columns": study.GPU_COLUMNS,
        "left_out": {},
        **series.figures(),
    }


def test_a_system_that_hangs_is_a_row_that_says_so_with_its_last_lines() -> None:
    text = report.markdown(figures_with_a_hang())
    header, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert header.count("|") == len(rows[-1].strip().split("|")) - 1
    assert rows[-1].startswith("| another | took too long: it did not end | - |")
    assert rows[-1].endswith("| 0 |")
    assert text.endswith(
        "another, took too long: it did not end:\n\n```text\nwaiting for process 12\n```"
    )


def test_a_document_has_a_table_for_each_model() -> None:
    figures = figures_with_a_hang()
    assert report.document([figures, figures]).count("| ours |") == 2


# ---------------------------------------------------------------------- one real run


def test_a_quick_study_measures_ours(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    arguments = ["--gpu", "--quick", "--systems", "flashckpt", "--json", str(file)]
    # Short: the path of an agent's socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="b") as short:
        scratch = Path(short) / "s"
        scratch.mkdir()
        done = run_within(
            280,
            [sys.executable, "-m", "benchmarks", "train", *arguments, "--dir", str(scratch)],
            env={**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": short},
            cwd=REPO,
        )
        assert not list(scratch.iterdir())
    assert done.returncode == 0, done.stdout + done.stderr
    (figures,) = report.read_figures(file)
    assert figures["forked"], done.stdout
    systems = figures["systems"]
    assert systems["flashckpt"]["failed"] is None
    assert {*study.GPU_COLUMNS} <= systems["flashckpt"]["figures"].keys()


def test_a_study_on_a_gpu_needs_one(tmp_path: Path) -> None:
    options = argparse.Namespace(size="usual", budget=1.0, systems=None)
    with pytest.raises(SystemExit, match="torch sees no GPU"):
        next(study.run_on_gpu(options, tmp_path))


def test_a_study_on_a_gpu_prints_which_systems_are_left_out_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the one run on a scarce GPU lacks a system, and nobody notices."""
    lacking = System("absent", "Another", package="no_such_package", flag=None)
    monkeypatch.setattr(study, "GPU_ONLY", (lacking,))
    options = argparse.Namespace(size="quick", budget=1.0, systems=["absent"])
    first = next(study.run_on_gpu(options, tmp_path))
    assert first == "Another was left out: no_such_package is not installed"
