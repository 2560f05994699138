"""Saves to host memory between saves to storage, on real Megatron: a crash resumes from the newest.

Saves go to memory every 2 iterations, to storage every 4. A trains 8 iterations without a crash
(saves to memory requested by Megatron's own flag). B loses a rank in iteration 3, before the first
save to storage, and again in iteration 7. D loses all memory, and has copies on a local disk.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_flashckpt.file_format.file_names import OWN
from tests.support.histories import saves_in
from tests.support.megatron_jobs import (
    Result,
    await_no_agent,
    differing,
    run_job,
    succeeded,
    tensors,
)
from tests.support.trainer import agents_under, eventually, kill_agent

MODEL = [
    *("--num-layers", "2", "--bf16", "--use-distributed-optimizer"),
    *("--train-iters", "8", "--save-interval", "4"),
]
RANKS = 2


def job(tmp_path: Path, name: str, *more: str, restarts: int = 0, **env: str) -> Result:
    save = str(tmp_path / name)
    return succeeded(
        run_job(
            tmp_path,
            name,
            [*MODEL, "--save", save, "--load", save, *more],
            ranks=RANKS,
            max_restarts=restarts,
            env=env,
        )
    )


class Jobs:
    """Two jobs, each run once."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.a = job(tmp_path, "A", "--non-persistent-save-interval", "2")
        every = {"FLASHCKPT_MEMORY_INTERVAL": "2"}
        self.b = job(tmp_path, "B", restarts=2, KILL="1:3 1:7", **every)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("memory"))


def test_a_lost_rank_resumes_bit_for_bit_from_a_memory_save(jobs: Jobs) -> None:
    restored = re.findall(r"iteration (\d+) was restored from (\w+)", jobs.b.log)
    assert restored == [("2", "memory"), ("6", "memory")]
    expected = jobs.a.losses()
    first, second = jobs.b.losses(1), jobs.b.losses(2)
    assert {n: first[n] for n in range(3, 7)} == {n: expected[n] for n in range(3, 7)}
    assert second == {n: expected[n] for n in (7, 8)}
    assert differing(tensors(jobs.tmp_path / "A", 8), tensors(jobs.tmp_path / "B", 8)) == []


def test_a_node_that_lost_all_memory_resumes_from_its_disk(jobs: Jobs, tmp_path: Path) -> None:
    """A byte of the newest copy of one rank changes: all ranks load the memory-only save before."""
    disk, save = tmp_path / "disk", str(tmp_path / "D")
    disk.mkdir()
    arguments = [*MODEL, "--save", save, "--load", save, "--save-interval", "100"]
    env = {"FLASHCKPT_MEMORY_INTERVAL": "2", "FLASHCKPT_LOCAL_TIER__DIRECTORY": str(disk)}
    once = f"{tmp_path}/run/agent-*.log:iteration 6 is durable on this node:{RANKS}"
    killed = run_job(
        *(tmp_path, "D", arguments), ranks=RANKS, env={**env, "KILL": "1:7", "KILL_ONCE": once}
    )
    assert killed.returncode != 0
    (agent,) = agents_under(tmp_path / "run")
    kill_agent(agent)
    (copy,) = disk.rglob("iter_0000006/*.rank_00001.safetensors")
    content = bytearray(copy.read_bytes())
    content[-1000] ^= 1
    copy.write_bytes(content)
    again = succeeded(run_job(tmp_path, "again", arguments, ranks=RANKS, env=env))
    assert "iteration 4 was restored from memory" in again.log
    expected = jobs.a.losses()
    assert again.losses() == {iteration: expected[iteration] for iteration in range(5, 9)}
    assert differing(tensors(jobs.tmp_path / "A", 8), tensors(tmp_path / "D", 8)) == []
    eventually("the end of the agent", lambda: not agents_under(tmp_path / "run"))
    assert not [path for path in disk.rglob("*") if path.is_file()], "the job has ended in order"


def test_memory_saves_are_logged_as_kept_and_leave_storage_unchanged(jobs: Jobs) -> None:
    await_no_agent(jobs.tmp_path)
    for name, result in (("A", jobs.a), ("B", jobs.b)):
        kept = re.findall(r"iteration (\d+) kept in host memory, not in storage", result.log)
        due = {2, 6}  # a durable save is due at 4 and 8
        # B dies in the iterations in which the agent would report these saves.
        assert set(map(int, kept)) == due if name == "A" else set(map(int, kept)) <= due
        saved = re.findall(r"successfully saved checkpoint from iteration +(\d+)", result.log)
        assert list(map(int, saved)) == [4, 8]
        began = re.findall(r"saving checkpoint at iteration +(\d+) to (host memory)?", result.log)
        where = [(int(iteration), bool(memory)) for iteration, memory in began]
        assert where == [(2, True), (4, False), (6, True), (8, False)]
        assert sorted(path.name for path in (jobs.tmp_path / name).iterdir()) == [
            OWN,
            "iter_0000004",
            "iter_0000008",
            "latest_checkpointed_iteration.txt",
        ]
        past = saves_in(jobs.tmp_path / name)
        assert [save.iteration for save in past] == [4, 8]
    assert "memory_interval 2: as with --non-persistent-save-interval 2" in jobs.b.log


def test_a_save_to_memory_does_not_communicate(jobs: Jobs) -> None:
    saves = jobs.a.named("save") + jobs.b.named("save")
    assert sorted({save["iteration"] for save in saves}) == [2, 4, 6, 8]
    assert [save for save in saves if save["calls"]] == []


def test_a_memory_save_right_before_the_exit_is_written_to_storage(tmp_path: Path) -> None:
    """Megatron counts a save to memory as a save and therefore makes none when it exits.

    That holds for an exit in the last iteration, too, although a job that ends there without an
    exit saves once more. `test_flags.py` has an exit before the last iteration.
    """
    save = tmp_path / "save"
    arguments = [*MODEL, "--save", str(save), "--exit-interval", "8"]
    arguments += ["--save-interval", "3", "--non-persistent-save-interval", "2"]
    result = succeeded(run_job(tmp_path, "exit", arguments, ranks=1))
    assert "the last save, iteration 8, is written to storage before the job" in result.log
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "8"
    assert tensors(save, 8)
