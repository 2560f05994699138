"""A job is started again while the ranks of its first start live and train on.

Torchrun of the first start is killed with SIGKILL in iteration 2; its ranks survive. They are held
in iteration 3 until the second start, which resumes from their iteration 2, has committed iteration
5. Then they save iterations 3 to 5, while the second start is held in iteration 6.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import psutil
import pytest

from benchmarks.train.descendants import orphans_come_here
from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.file_format.end import End, kind_of
from megatron_flashckpt.file_format.file_names import run_number, run_of, save_of
from tests.support.megatron_jobs import Result, await_no_agent, run_job, succeeded
from tests.support.stored import await_tracker
from tests.support.trainer import eventually

RANKS = 2


@dataclasses.dataclass
class TwoStarts:
    save: Path
    first: Result
    statuses: list[int]
    """Exit statuses of the first start's ranks, in rank order."""
    second: Result
    pids: list[int]
    """Process ids of the first start's ranks."""


def traced(trace: Path) -> list[dict]:
    events = []
    for rank in range(RANKS):
        lines = (trace / f"rank_{rank}.jsonl").read_text().splitlines()
        events += [{"rank": rank, **json.loads(line)} for line in lines]
    return events


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> TwoStarts:
    where = tmp_path_factory.mktemp("second-start")
    save = where / "save"
    tracker = save / "latest_checkpointed_iteration.txt"

    def job(name: str, hold: str, last: int, **more: str) -> Result:
        arguments = [*("--num-layers", "2", "--bf16", "--use-distributed-optimizer")]
        arguments += ["--train-iters", "7", "--save-interval", "1", "--exit-interval", str(last)]
        arguments += ["--save", str(save), "--load", str(save)]
        env = {"HOLD": hold, "FLASHCKPT_AGENT__GRACE_S": "200", **more}
        return run_job(where, name, arguments, ranks=RANKS, env=env, torchrun=name == "first")

    with orphans_come_here():
        killed = job("first", f"3:{tracker}:5", 5, SIGNALS="KILL:torchrun:2")
        assert killed.returncode == -9
        ranks = {
            int(process.environ()["RANK"]): process
            for process in psutil.Process().children()
            if process.environ().get("TRACE_DIR") == str(where / "trace-first")
            and "RANK" in process.environ()
        }
        try:
            await_tracker(save, 2)
            # The first start reports its plans at the end of its training.
            second = succeeded(job("second", f"6:{where}/trace-first/rank_0.jsonl:plans", 7))
            statuses = []
            for rank in range(RANKS):
                ended = eventually(
                    f"the end of rank {rank}",
                    lambda rank=rank: os.waitid(
                        os.P_PID, ranks[rank].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
                    ),
                    120,
                )
                assert ended.si_code == os.CLD_EXITED
                statuses.append(ended.si_status)
        finally:
            for process in ranks.values():
                process.kill()
                os.waitpid(process.pid, 0)
    first = Result(-9, (where / "log-first-0").read_text(), traced(where / "trace-first"))
    await_no_agent(where)
    return TwoStarts(save, first, statuses, second, [ranks[rank].pid for rank in range(RANKS)])


def test_the_first_start_logs_why_its_saves_fail_and_exits_with_1(starts: TwoStarts) -> None:
    log = starts.first.log
    for iteration in (3, 4, 5):
        (message,) = re.findall(rf"rank 0: iteration {iteration} was not saved: .*", log)
        assert re.search(
            r"process \d+ of the same rank on this node has replaced .* end it", message
        )
    (verdict,) = re.findall(r"the last save, iteration 5, is not durable: .*", log)
    assert f"the newest durable checkpoint in {starts.save} is iteration 2" in verdict
    assert "the exit status is 1" in verdict
    assert starts.statuses == [1, 0], "only rank 0 reports the failure in its exit status"


def test_the_second_start_names_the_processes_of_the_first(starts: TwoStarts) -> None:
    named = re.findall(r"rank (\d): process (\d+), an earlier one of this rank", starts.second.log)
    assert {(int(rank), int(pid)) for rank, pid in named} == set(enumerate(starts.pids))


def test_the_second_start_resumes_from_memory_bit_for_bit(starts: TwoStarts) -> None:
    assert "iteration 2 was restored from memory" in starts.second.log
    first, second = starts.first.losses(), starts.second.losses()
    assert sorted(second) == [3, 4, 5, 6, 7]
    assert all(sorted(first[iteration]) == sorted(second[iteration]) for iteration in (3, 4, 5))


def test_every_checkpoint_is_whole_and_of_one_start(
    starts: TwoStarts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(starts.save), "--all"]) == 0, capsys.readouterr().out
    ends = starts.save.glob("iter_*/*.end")
    committed = {
        path: path.name.removesuffix(".end")
        for path in sorted(ends)
        if kind_of(path.read_bytes()) is End.COMMITTED
    }
    runs = {int(path.parent.name[5:]): run_of(save_id) for path, save_id in committed.items()}
    assert len(committed) == 7, "no iteration was saved by both starts"
    assert list(runs) == [1, 2, 3, 4, 5, 6, 7]
    assert list(runs.values()) == [runs[1]] * 2 + [runs[7]] * 5
    assert run_number(runs[7]) == run_number(runs[1]) + 1
    of_failed = {
        path.name
        for path in starts.save.glob("iter_*/*")
        if save_of(path.name) not in committed.values()
    }
    assert all(name.endswith(".end") for name in of_failed), "files of a failed save are left"
