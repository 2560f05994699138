"""Jobs of `python -m benchmarks train`: they are measured, and they always end; one is real."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.train import figures, measure, report, study, watch
from benchmarks.train.job import Job, JobError, Megatron, running
from benchmarks.train.measure import Session
from benchmarks.train.sizes import Schedule
from benchmarks.train.storage_limit import StorageLimit
from benchmarks.train.systems import System
from tests.support.processes import run_within
from tests.support.trainer import eventually

REPO = Path(__file__).resolve().parents[1]
#: A script that trains nothing, but prints, saves and loads as Megatron does.
TRAINING = """
import argparse, os, time
from pathlib import Path
parser = argparse.ArgumentParser()
for name in ("train-iters", "save-interval"):
    parser.add_argument(f"--{name}", type=int)
for name in ("save", "load"):
    parser.add_argument(f"--{name}", type=Path)
args, rank, first = parser.parse_args(), os.environ["RANK"], 0
left_out = [int(number) for number in os.environ["LEFT_OUT"].split()]
if args.load:
    assert "NO_LOAD" not in os.environ
    first = int((args.load / "latest_checkpointed_iteration.txt").read_text())
    print("    load-checkpoint ....: (1.5, 2.0)")
for number in range(first + 1, args.train_iters + 1):
    with open(f"{os.environ['LOSS_LOG']}.{rank}", "a") as log:
        print(number, float(number).hex(), file=log)
    print(f" iteration {number:8d}/ {args.train_iters} |", flush=True)
    is_due = args.save and (number % args.save_interval == 0 or number == args.train_iters)
    if rank == "0" and is_due and number not in left_out:
        directory = args.save / f"iter_{number:07d}"
        directory.mkdir(parents=True)
        (directory / "shard").write_bytes(bytes(1000))
        (args.save / "latest_checkpointed_iteration.txt").write_text(str(number))
    if args.load:
        time.sleep(0.1)
"""
PLAIN = System("plain", "plain")


def session_of(tmp_path: Path) -> Session:
    return Session(Schedule(interval=2, saves=3), tmp_path, 60.0, lambda _: None)


def training(tmp_path: Path, left_out: str = "") -> Megatron:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    return Megatron(script, (), {**os.environ, "LEFT_OUT": left_out}, tmp_path)


def test_a_run_is_measured_and_an_earlier_checkpoint_of_it_is_loaded(tmp_path: Path) -> None:
    run = session_of(tmp_path).measure(PLAIN, training(tmp_path))
    assert list(run.ended_at) == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(run.ended_at.values()) == list(run.ended_at.values())
    assert (run.saved, run.nbytes) == ([2, 4, 6, 7], 1000)
    assert run.losses[7] == [f"{rank}:{float(7).hex()}" for rank in (0, 1)]
    (restart,) = run.restarts.values()
    assert (restart.resumed_from, restart.load_s) == (4, 0.002)
    # The ranks do not wait for each other, so the kill may precede one rank's line.
    assert set(restart.losses[5]) <= set(run.losses[5])
    assert not (tmp_path / "run").exists()
    megatron = training(tmp_path)
    megatron.env["NO_LOAD"] = "1"
    run = session_of(tmp_path).measure(PLAIN, megatron)
    assert (run.saved, run.restarts) == ([2, 4, 6, 7], {}), "a failed restart leaves the figures"
    assert "AssertionError" in run.restart_error


def test_only_a_system_known_for_it_may_skip_saves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = dataclasses.replace(PLAIN, leaves_out_saves=True)
    run = session_of(tmp_path).measure(known, training(tmp_path, "4 7"))
    assert (run.saved, run.nbytes) == ([2, 6], 1000)
    assert run.restarts["storage"].resumed_from == 2
    monkeypatch.setattr(measure, "_COMMIT_S", 0.1)
    with pytest.raises(JobError, match="its newest checkpoint is that of 6"):
        session_of(tmp_path).measure(PLAIN, training(tmp_path, "7"))
    assert not (tmp_path / "run").exists()


def started(
    tmp_path: Path, script: str, *, silence_s: float = 60.0, **environment: str
) -> contextlib.AbstractContextManager[Job]:
    """Return a job of two ranks that run `script`."""
    file = tmp_path / "script.py"
    file.write_text(f"import os, subprocess, sys, time\nrank = int(os.environ['RANK'])\n{script}")
    megatron = Megatron(file, (), dict(os.environ), tmp_path)
    runner = (sys.executable,)
    return running(megatron, runner, [], environment, print, silence_s=silence_s)


def test_a_failed_rank_ends_the_other_rank_and_all_their_processes(tmp_path: Path) -> None:
    """One of them is like an agent: it has only one variable of the job."""
    script = """
if rank:
    time.sleep(1000)
kept = {"FLASHCKPT_RUNTIME_DIR": os.environ["FLASHCKPT_RUNTIME_DIR"]}
for environment in (None, kept):
    child = subprocess.Popen(["/bin/sleep", "1000"], env=environment, start_new_session=True)
    print("child", child.pid)
print("x" * 1_000_000)
raise ValueError("no such thing")
"""
    with (
        pytest.raises(JobError, match="ended with 1\n  ValueError: no such thing") as caught,
        started(tmp_path, script, FLASHCKPT_RUNTIME_DIR=str(tmp_path / "agents")) as made,
    ):
        made.wait(time.perf_counter() + 60)
    children = [int(line.split()[1]) for line in caught.value.log.splitlines() if "child" in line]
    assert len(children) == 2, "all is read that the rank wrote"
    for child in children:
        assert (
            not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        )
    assert made.processes() == []


def test_a_job_that_prints_nothing_for_long_hangs(tmp_path: Path) -> None:
    script = "print('last', flush=True); time.sleep(1000)"
    with (
        started(tmp_path, script, silence_s=1.0) as made,
        pytest.raises(JobError, match="printed nothing for 1 s: it did not end\n  l"),
    ):
        made.wait(time.perf_counter() + 60)


def test_the_tracker_is_timed_and_the_largest_fall_of_available_memory_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert watch.available_nbytes() > 1 << 20
    readings = iter([1000, 900, 300, 1200])
    monkeypatch.setattr(watch, "available_nbytes", lambda: next(readings, 800))
    tracker, output = tmp_path / "tracker", tmp_path / "output"
    output.touch()
    watched = watch.Watch([output], tracker, lambda line, at: None)
    for iteration in (5, 10):
        tracker.write_text(str(iteration))
        eventually("an iteration", lambda: iteration in watched.tracked_at)  # noqa: B023
    eventually("all readings", lambda: readings.__length_hint__() == 0)
    watched.finish()
    assert list(watched.tracked_at) == [5, 10]
    assert watched.tracked_at[5] <= watched.tracked_at[10]
    assert watched.peak_nbytes == 700


def test_processes_share_a_storage_of_limited_bandwidth(tmp_path: Path) -> None:
    limited, free = tmp_path / "limited", tmp_path / "free"
    limited.mkdir()
    free.mkdir()
    limit = StorageLimit.made(tmp_path, mb_s=20)
    code = "import os, sys; open(sys.argv[1], 'wb').write(bytes(4_000_000)); "
    code += "assert len(open(sys.argv[1], 'rb').read()) == 4_000_000"

    def seconds(directory: Path) -> float:
        env = {**os.environ, **limit.environment(limited)}
        started_at = time.perf_counter()
        processes = [
            subprocess.Popen([sys.executable, "-c", code, str(directory / str(n))], env=env)
            for n in range(2)
        ]
        assert [process.wait(60) for process in processes] == [0, 0]
        return time.perf_counter() - started_at

    assert seconds(limited) >= 16 / 20, "16 MB, written and read by the two"
    clock = Path(limit.environment(limited)["TRAIN_LIMIT_CLOCK"])
    after_limited = clock.read_bytes()
    assert after_limited != bytes(8), "a truncated file would kill a process that has mapped it"
    seconds(free)
    assert clock.read_bytes() == after_limited, "the free path is limited"
    assert limit.was_passed(40_000_000, 1.0)
    assert not limit.was_passed(40_000_000, 2.0)
    # The load of this script reads nothing.
    session = dataclasses.replace(
        session_of(tmp_path), limit=dataclasses.replace(limit, mb_s=0.003)
    )
    with pytest.raises(JobError, match=r"its load took .* the storage's limit"):
        session.measure(PLAIN, training(tmp_path))


# ---------------------------------------------------------------------- one real run


def test_real_megatron_trains_saves_and_restarts_from_storage_and_memory(tmp_path: Path) -> None:
    scratch, file = tmp_path / "s", tmp_path / "train.json"
    scratch.mkdir()
    before = (study.RESULTS / "train.json").stat().st_mtime_ns
    arguments = ["train", "--quick", "--systems", "flashckpt", "--dir", str(scratch)]
    done = run_within(
        280,
        [sys.executable, "-m", "benchmarks", *arguments, "--json", str(file)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        cwd=REPO,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "minutes on two quiet cores" in done.stdout.splitlines()[0]
    (results,) = report.read_figures(file)
    assert results["errors"] == []
    ours = results["systems"]["flashckpt"]
    (run,) = ours["runs"]
    assert run["saved"] == [3, 6, 8]
    assert len(run["ended_at"]) == 8
    assert ours["figures"].keys() == figures.LABELS.keys()
    assert ours["failed"] is None
    assert 0.01 < ours["figures"]["gb"]["median"] < 0.1
    assert not list(scratch.iterdir())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert str(scratch) not in str(process.cmdline()), "an agent was left behind"
    after = (study.RESULTS / "train.json").stat().st_mtime_ns
    assert after == before, "a quick run has replaced the published figures"
