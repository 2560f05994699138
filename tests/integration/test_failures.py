"""Background saves that fail: the log reports each once, and training continues by default."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_storage.preload import FaultyStorage, fail
from tests.support.megatron_jobs import Result, await_no_agent, committed, run_job, succeeded

MODEL = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer"]
RANKS = 2


def failing_save(
    tmp_path: Path, *, iterations: tuple[int, ...] = (2,), train_iters: int = 6, **kwargs: Any
) -> Result:
    """Train while regular files occupy the paths of these iterations' directories."""
    save = tmp_path / "save"
    save.mkdir()
    for iteration in iterations:
        (save / f"iter_{iteration:07d}").write_text("in the way")
    return run_job(
        tmp_path,
        "failing",
        [*MODEL, "--train-iters", str(train_iters), "--save", str(save), "--save-interval", "2"],
        ranks=RANKS,
        **kwargs,
    )


def test_rank_0_reports_an_io_error_and_training_continues(
    tmp_path: Path,
) -> None:
    """Both ranks' shards fail. Rank 1 also logs the failure if it fails before rank 0."""
    result = succeeded(failing_save(tmp_path))
    assert sorted(result.losses()) == [1, 2, 3, 4, 5, 6]
    errors = re.findall(r"rank \d: iteration 2 was not saved: .*", result.log)
    (error,) = (
        message
        for message in errors
        if message.startswith("rank 0: iteration 2 was not saved: [Errno ")
    )
    assert len(errors) <= RANKS
    assert f"{tmp_path}/save/iter_0000002" in error
    assert "move it away" in error
    # The agents try for 5 s to report the failure to other nodes; meanwhile iteration 4 is durable.
    assert re.search(rf"; (there is no|the newest) durable checkpoint in {tmp_path}/save", error)
    staged = re.findall(r"^.*iteration (\d) staged.*", result.log, re.MULTILINE)
    assert staged == ["2", "4", "6"], "one line says that a save is staged"
    assert "INFO:megatron_flashckpt" not in result.log, "Megatron's root logger prints INFO"
    assert (tmp_path / "save/iter_0000002").read_text() == "in the way"
    assert (tmp_path / "save/latest_checkpointed_iteration.txt").read_text() == "6"


@pytest.mark.second_tier
def test_all_ranks_skip_a_save_without_free_slot_and_log_it_once(tmp_path: Path) -> None:
    """A save takes far longer than an iteration; the last save is written after all."""
    save = tmp_path / "save"
    every = ["--train-iters", "8", "--save", str(save), "--save-interval", "1"]
    # All shards take 1.4 MiB, and the rate limit lets chunks through one by one.
    env = {"FLASHCKPT_BUSY": "skip", "FLASHCKPT_AGENT__WRITE_MIB_PER_S": "1"}
    result = succeeded(run_job(tmp_path, "skip", [*MODEL, *every], ranks=RANKS, env=env))
    assert sorted(result.losses()) == [*range(1, 9)]
    logged = re.findall(r"iteration (\d) is not saved: previous saves are still", result.log)
    skipped = {int(iteration) for iteration in logged}
    assert skipped
    assert len(logged) == len(skipped), "only rank 0 logs a skipped save"
    assert ("the last save, iteration 8, is written to storage" in result.log) == (8 in skipped)
    skipped.discard(8)
    assert set(committed(save)) == set(range(1, 9)) - skipped
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "8"


def full_disk(tmp_path: Path, part: str, **env: str) -> Result:
    """Train 12 iterations and save every second one; some files of the agents find no space."""
    save = tmp_path / "save"
    save.mkdir()
    faulty = FaultyStorage(save, tmp_path)
    faulty.rule(fail("fallocate", errno.ENOSPC, part))
    arguments = [*MODEL, "--train-iters", "12", "--save", str(save), "--save-interval", "2"]
    named = ", ".join(faulty.environment)
    env = {**faulty.environment, "FLASHCKPT_AGENT__ENVIRONMENT": f"[{named}]", **env}
    result = run_job(tmp_path, "full", arguments, ranks=RANKS, env=env)
    assert faulty.hits(), "no agent has hit the full disk: does the agent get LD_PRELOAD?"
    return result


def test_a_job_that_cannot_save_at_all_stops_training(tmp_path: Path) -> None:
    result = full_disk(tmp_path, "safetensors")
    assert result.returncode != 0
    (error, *others) = set(re.findall(r"SaveFailedError: (training stops.*)", result.log))
    assert others == [], "all ranks raise the same error"
    assert "iteration 2 has failed for a reason that persists until someone acts" in error
    assert re.search(rf"{tmp_path}/save/iter_0000002/\S+\.rank_0000\d\.safetensors", error)
    assert "No space left on device" in error
    assert "free space there or save elsewhere" in error
    assert "stop_on_failed_first_save: false" in error
    assert 2 <= max(result.losses()) < 12


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("part", "stops"), [("iter_0000004", "true"), ("iter_0000002", "false")], ids=["later", "off"]
)
def test_a_full_disk_stops_no_job_that_saved_before_or_may_continue(
    tmp_path: Path, part: str, stops: str
) -> None:
    result = full_disk(tmp_path, part, FLASHCKPT_STOP_ON_FAILED_FIRST_SAVE=stops)
    assert succeeded(result).losses().keys() == set(range(1, 13))
    assert f"iteration {int(part[5:])} was not saved" in result.log
    assert (tmp_path / "save/latest_checkpointed_iteration.txt").read_text() == "12"


@pytest.mark.second_tier
def test_training_stops_after_the_configured_number_of_failures_in_a_row(tmp_path: Path) -> None:
    """Saves at 2, 6 and 8 fail and the one at 4 succeeds: only at 8 have two in a row failed.

    Saves to memory in between never fail and do not count.
    """
    env = {"FLASHCKPT_FAILURES_IN_A_ROW": "2", "FLASHCKPT_MEMORY_INTERVAL": "1"}
    env["FLASHCKPT_WAIT"] = "durable"
    result = failing_save(tmp_path, iterations=(2, 6, 8), train_iters=12, env=env)
    assert result.returncode != 0
    assert (
        "SaveFailedError: 2 saves in a row have failed, and 'failures_in_a_row' is 2; the last"
        in (result.log)
    )
    assert max(result.losses()) == 8
    assert (tmp_path / "save/latest_checkpointed_iteration.txt").read_text() == "4"


@pytest.fixture(scope="module")
def lost_agents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Save at 2, 4 and 6; the agent is killed after the first save, the next agent is stopped."""
    tmp_path = tmp_path_factory.mktemp("agent")
    save = str(tmp_path / "save")
    arguments = [*MODEL, "--train-iters", "6", "--save", save, "--save-interval", "2"]
    signals = "KILL:agent:3 STOP:agent:5"
    env = {"SIGNALS": signals, "FLASHCKPT_AGENT__ANSWER_TIMEOUT_S": "1"}
    return tmp_path, succeeded(run_job(tmp_path, "agent", arguments, ranks=RANKS, env=env))


def test_one_rank_of_a_node_reports_an_agent_that_has_ended_or_hangs(
    lost_agents: tuple[Path, Result],
) -> None:
    _, result = lost_agents
    for rank in range(RANKS):
        messages = re.findall(
            rf"rank {rank}: (the agent of this node is gone.*); a new agent adopts", result.log
        )
        assert len(messages) == (2 if rank == 0 else 0)
        assert all("/agent-" in message for message in messages)
    assert re.search(r"agent \d+ did not answer within 1 s: killed", result.log)
    assert sorted(result.losses()) == [1, 2, 3, 4, 5, 6]


def test_a_new_agent_persists_the_staged_slots_of_a_killed_one(
    lost_agents: tuple[Path, Result],
) -> None:
    tmp_path, result = lost_agents
    assert (tmp_path / "save/latest_checkpointed_iteration.txt").read_text() == "6"
    assert committed(tmp_path / "save") == [2, 4, 6]
    for iteration in (2, 4, 6):
        line = f"successfully saved checkpoint from iteration       {iteration}"
        assert result.log.count(line) == 1
    assert "was not saved" not in result.log
    await_no_agent(tmp_path)
