"""A damaged checkpoint: all ranks load the next older one completely, and the log reports that.

One job saves iterations 2 and 4. Another runs all kinds of damage through Megatron's real
`load_checkpoint`. A third trains on from a damaged directory, a fourth from iteration 2.
"""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

import pytest

from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.file_format.file_names import TRACKER
from tests.integration.test_bad_input import newer_version_in
from tests.support.load_cases import Damage, LoadCases
from tests.support.load_cases import shard as shard_in
from tests.support.megatron_jobs import (
    Result,
    differing,
    run_job,
    succeeded,
    tensors,
    truncated_copy,
)

MODEL = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer"]
MODEL += ["--train-iters", "6", "--save-interval", "2"]
NEWEST, OLDER = "iter_0000004", "iter_0000002"


def shard(directory: Path, rank: int, iteration: str = NEWEST) -> Path:
    return shard_in(directory / iteration, rank)


def flip(file: Path, position: int = -1000) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)


def common(directory: Path) -> Path:
    (file,) = (directory / NEWEST).glob("*.common.msgpack")
    return file


def manifest(directory: Path) -> Path:
    (file,) = (directory / NEWEST).glob("*.end")
    return file


#: name -> (damage, pattern of the log line, lost iterations).
DAMAGE: dict[str, tuple[Damage, str, str]] = {
    "data of one rank flipped": (
        lambda d: flip(shard(d, 1)),
        r"rank_00001\.safetensors, chunk",
        "2 iterations are lost",
    ),
    "shard missing": (
        lambda d: shard(d, 1).unlink(),
        r"rank_00001.*is missing",
        "2 iterations are lost",
    ),
    "manifest flipped": (lambda d: flip(manifest(d)), r"\.end: ", "2 iterations are lost"),
    "common flipped": (
        lambda d: flip(common(d)),
        r"common\.msgpack: digest",
        "2 iterations are lost",
    ),
    "directory gone": (
        lambda d: shutil.rmtree(d / NEWEST),
        r"holds no end of a save",
        "at most 2 iterations are lost",
    ),
    "tracker to nowhere": (
        lambda d: (d / TRACKER).write_text("77"),
        r"iter_0000077.*was not committed",
        "at most 73 iterations are lost",
    ),
    "tracker garbage": (
        lambda d: (d / TRACKER).write_bytes(b"\0\xff4"),
        r"is no iteration",
        "nothing is lost",
    ),
}
CORRUPT = ("CorruptCheckpointError", r"rank_00001\.safetensors, chunk 0")
#: name -> (damage, arguments and settings of the case, error class, pattern of its message)
REFUSED: dict[str, tuple[Damage, dict, str, str]] = {
    "configured to stop": (lambda d: flip(shard(d, 1)), {"config": {"damaged": "stop"}}, *CORRUPT),
    "asked for by number": (lambda d: flip(shard(d, 1)), {"args": {"ckpt_step": 4}}, *CORRUPT),
    "to be tuned": (lambda d: flip(shard(d, 1)), {"args": {"finetune": True}}, *CORRUPT),
    "of another release": (
        lambda d: newer_version_in(manifest(d)),
        {},
        "FormatVersionError",
        "format version 99",
    ),
    "all damaged": (
        lambda d: (flip(shard(d, 1)), flip(shard(d, 0, OLDER))),
        {},
        "CorruptCheckpointError",
        r"(?s)every checkpoint is damaged:\n  4 in storage: .*rank_00001.*\n  2 in .*rank_00000",
    ),
}
#: name -> (rank 1's errors in reading its newest shard, the iteration that is loaded)
TROUBLE: dict[str, tuple[dict, int]] = {
    "an error that passes": ({"errno": errno.EIO, "times": 3}, 4),
    "an error that lasts": ({"errno": errno.EIO, "times": 1000}, 2),
}
AWAY = "storage that is away"
#: The job may also finetune the model of another directory, and one rank does not see the tracker.
NOT_PRETRAINED = "a tracker that one rank does not see"


def train(where: Path, name: str, save: Path, *more: str) -> Result:
    arguments = [*MODEL, "--save", str(save), "--load", str(save), *more]
    env = {"FLASHCKPT_SHARE_READS": "always"}
    return succeeded(run_job(where, name, arguments, ranks=LoadCases.RANKS, env=env))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> LoadCases:
    where = tmp_path_factory.mktemp("fall_back")
    train(where, "save", where / "good", "--exit-interval", "4")
    job = LoadCases(where, where / "good")
    job.add("older", args={"ckpt_step": 2})
    job.add("newest")
    for name, (damage, *_) in DAMAGE.items():
        job.add(name, damage)
    away = {AWAY: ({"errno": errno.ETIMEDOUT, "times": 1000}, 0)}
    for name, (trouble, _) in {**TROUBLE, **away}.items():
        job.add(name, trouble={"on": 1, "name": f"{NEWEST}/", **trouble})
    for name, (damage, more, *_) in REFUSED.items():
        job.add(name, damage, **more)
    job.add(NOT_PRETRAINED, args={"pretrained_checkpoint": str(job.good)}, no_tracker_on=1)
    for case in job.cases:
        case["config"] = {"share_reads": "always", **case.get("config", {})}
    job.run(MODEL)
    return job


def states(ran: LoadCases, name: str) -> list[str]:
    return [event["state"] for event in ran.of(name)]


def blocks(ran: LoadCases, name: str) -> list[str]:
    """Return the multi-line warnings about the directory of a case."""
    return re.findall(
        rf"^={{60,}}\nDAMAGED CHECKPOINT in {re.escape(str(ran.place(name)))}\n(.*?)\n={{60,}}$",
        ran.result.log,
        re.MULTILINE | re.DOTALL,
    )


@pytest.mark.parametrize("name", DAMAGE)
def test_all_ranks_load_the_intact_checkpoint_and_no_damaged_state(
    ran: LoadCases, name: str
) -> None:
    """The log names the damage and the lost iterations, once."""
    _, damage, lost = DAMAGE[name]
    loaded = 4 if name.startswith("tracker") else 2  # else the newest checkpoint is damaged
    for event in ran.of(name):
        assert (event["error"], event["result"]) == (None, loaded)
    assert states(ran, name) == states(ran, "newest" if loaded == 4 else "older")
    ran.assert_unchanged(name)
    (message,) = blocks(ran, name)
    assert re.search(damage, message), message
    match = re.search(
        r"TRAINING RESUMES FROM ITERATION (\d) in storage: (.*)$", message, re.MULTILINE
    )
    assert match is not None, message
    assert match.groups() == (str(loaded), lost)


@pytest.mark.parametrize("name", REFUSED)
def test_every_refused_load_stops_all_ranks_equally(ran: LoadCases, name: str) -> None:
    _, _, error, says = REFUSED[name]
    for event in ran.of(name):
        assert event["error"] is not None, "the load succeeded without an error"
        assert event["error"][0] == error
        assert re.search(says, event["error"][1]), event["error"][1]
    assert blocks(ran, name) == []
    ran.assert_unchanged(name)


@pytest.mark.parametrize("name", TROUBLE)
def test_a_passing_error_loses_no_iteration(ran: LoadCases, name: str) -> None:
    _, loaded = TROUBLE[name]
    for event in ran.of(name):
        assert (event["error"], event["result"]) == (None, loaded)
    assert states(ran, name) == states(ran, "newest" if loaded == 4 else "older")
    assert len(blocks(ran, name)) == (loaded == 2)
    place = re.escape(str(ran.place(name)))
    retries = re.findall(rf"{place}/.*; retry (\d+) in", ran.result.log)
    assert "1" in retries


def test_unavailable_storage_stops_all_ranks_and_loses_no_iteration(ran: LoadCases) -> None:
    for event in ran.of(AWAY):
        assert event["error"] is not None
        assert event["error"][0] == "StorageError"
        assert NEWEST in event["error"][1]
        assert "storage is unavailable: check" in event["error"][1]
    assert blocks(ran, AWAY) == []


def test_a_job_that_has_a_checkpoint_does_not_start_from_the_pretrained_one(ran: LoadCases) -> None:
    for event in ran.of(NOT_PRETRAINED):
        assert (event["error"], event["result"]) == (None, 4)
    assert states(ran, NOT_PRETRAINED) == states(ran, "newest")


def test_a_job_on_a_damaged_directory_trains_as_from_the_older_checkpoint(ran: LoadCases) -> None:
    damaged, older = ran.where / "D", ran.where / "C"
    shutil.copytree(ran.good, damaged)
    truncated_copy(ran.good, older, 2)
    flip(shard(damaged, 1))
    result, expected = train(ran.where, "d", damaged), train(ran.where, "c", older)
    assert "TRAINING RESUMES FROM ITERATION 2 in storage: 2 iterations are lost" in result.log
    assert sorted(result.losses()) == [3, 4, 5, 6]
    assert result.losses() == expected.losses()
    for iteration in (4, 6):
        assert differing(tensors(damaged, iteration), tensors(older, iteration)) == []
    # The new iteration 4 has replaced the damaged one, of which only its end is left for a while.
    assert (damaged / TRACKER).read_text() == "6"
    assert main(["verify", "--all", str(damaged)]) == 0
    left = {file.name for file in (ran.good / NEWEST).iterdir()}
    left &= {file.name for file in (damaged / NEWEST).iterdir()}
    assert [Path(name).suffix for name in left] == [".end"]
