"""Memory or storage: memory serves crashes and never overrules what a person did to the files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from megatron_flashckpt.file_format.file_names import TRACKER
from tests.support.megatron_jobs import Result, differing, run_job, succeeded, tensors
from tests.support.stored import await_tracker, tracked
from tests.support.trainer import copy_tree, remove_tree

MODEL = ["--num-layers", "1", "--bf16", "--use-distributed-optimizer"]


def train(
    tmp_path: Path, name: str, env: dict[str, str] | None = None, iterations: int = 6
) -> Result:
    save = str(tmp_path / "save")
    arguments = ["--train-iters", str(iterations), "--save-interval", "2"]
    arguments += ["--save", save, "--load", save]
    return run_job(tmp_path, name, [*MODEL, *arguments], ranks=1, env=env)


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """Run a job that is killed in iteration 6 after it committed 2 and 4; the agent keeps both."""
    result = train(tmp_path, "crash", {"KILL": "0:6"})
    assert result.returncode != 0
    await_tracker(tmp_path / "save", 4)
    return tmp_path


def test_a_job_started_again_by_hand_resumes_from_memory(crashed: Path) -> None:
    result = succeeded(train(crashed, "again"))
    figures = r"rank 0 copied ([\d.]+) MiB from its node's memory and received 0\.0 MiB from other"
    message = re.search(rf"iteration 4 was restored from memory: {figures}", result.log)
    assert message
    shards = (crashed / "save").glob("iter_0000004/*.safetensors")
    stored = sum(shard.stat().st_size for shard in shards) / 2**20
    assert 0.9 * stored < float(message[1]) <= stored
    assert min(result.losses()) == 5


def test_a_crash_in_the_save_after_the_loop_resumes_from_memory(tmp_path: Path) -> None:
    """The loop's end terminates Megatron's own saves, and must not give the slots up."""
    env = {"FLASHCKPT_FAULT": "rank0:stage.copied:3"}
    result = train(tmp_path, "crash", env, iterations=5)
    assert result.returncode != 0
    assert "after training is done" in result.log
    await_tracker(tmp_path / "save", 4)
    result = succeeded(train(tmp_path, "again", iterations=5))
    assert "iteration 4 was restored from memory" in result.log
    assert tracked(tmp_path / "save") == "5"


def test_a_replaced_checkpoint_is_loaded_instead_of_memory(crashed: Path) -> None:
    """A user has replaced the checkpoint by another job's checkpoint of the same iteration."""
    other = crashed / "other"
    arguments = ["--train-iters", "6", "--exit-interval", "4", "--seed", "77"]
    arguments += ["--save", str(other), "--save-interval", "4"]
    succeeded(run_job(crashed, "other", [*MODEL, *arguments], ranks=1))
    expected = tensors(other, 4)
    remove_tree(crashed / "save/iter_0000004")
    shutil.copytree(other / "iter_0000004", crashed / "save/iter_0000004")
    result = succeeded(train(crashed, "again"))
    assert "iteration 4 was restored from storage" in result.log
    (message,) = re.findall(r"iteration 4 in host memory .*", result.log)
    assert "the tracker names 4, which no run of this directory has saved" in message
    assert differing(tensors(crashed / "save", 4), expected) == []
    assert min(result.losses()) == 5


def test_memory_of_the_save_directory_is_named_if_another_one_is_loaded(crashed: Path) -> None:
    copy_tree(crashed / "save", crashed / "other")
    flags = ["--save", str(crashed / "save"), "--load", str(crashed / "other")]
    job = [*MODEL, "--train-iters", "6", "--save-interval", "2", *flags]
    result = succeeded(run_job(crashed, "again", job, ranks=1))
    assert "iteration 4 was restored from storage" in result.log
    assert f"iteration 4 of {crashed / 'save'} in host memory is not used" in result.log


def test_weights_are_pretrained_if_no_save_in_memory_counts(crashed: Path) -> None:
    """Before, Megatron's own loader got this package's checkpoint, and knew no such format."""
    copy_tree(crashed / "save", crashed / "pretrained")
    (crashed / "save" / TRACKER).unlink()
    flags = ["--save", str(crashed / "save"), "--load", str(crashed / "save")]
    flags += ["--pretrained-checkpoint", str(crashed / "pretrained")]
    job = [*MODEL, "--train-iters", "2", "--save-interval", "2", *flags]
    result = succeeded(run_job(crashed, "anew", job, ranks=1))
    assert "iteration 4 was restored from storage" in result.log
    (message,) = re.findall(r"iteration 4 in host memory .*", result.log)
    assert "the tracker was removed" in message
    assert min(result.losses()) == 1
