"""A damaged checkpoint: all ranks load the next older one completely, and the log reports that.

One job saves iterations 2 and 4. Another runs all kinds of damage through Megatron's real
`load_checkpoint`. A third trains on from a damaged directory, a fourth from iteration 2.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flashckpt.cli.commands import main
from megatron_flashckpt.file_format.file_names import TRACKED, TRACKER
from megatron_flashckpt.memory.slab import Slab
from tests.integration.test_bad_input import newer_version_in, snapshot
from tests.support.megatron_jobs import (
    Result,
    differing,
    run_cases,
    run_job,
    succeeded,
    tensors,
    truncated_copy,
)
from tests.support.stored import await_tracker
from tests.support.trainer import agents_under

MODEL = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer"]
MODEL += ["--train-iters", "6", "--save-interval", "2"]
RANKS = 2
NEWEST, OLDER = "iter_0000004", "iter_0000002"


def shard(directory: Path, rank: int, iteration: str = NEWEST) -> Path:
    (file,) = (directory / iteration).glob(f"*.rank_{rank:05d}.safetensors")
    return file


def flip(file: Path, position: int = -1000) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)


def put(file: Path, make: Callable[[Path], object]) -> None:
    if file.exists():
        file.rename(file.with_suffix(".kept"))
    make(file)


def common(directory: Path) -> Path:
    (file,) = (directory / NEWEST).glob("*.common.msgpack")
    return file


def manifest(directory: Path) -> Path:
    (file,) = (directory / NEWEST).glob("*.end")
    return file


def without_tracker(directory: Path) -> None:
    """Leave the directory as after the death of an agent that has not written a tracker yet."""
    (directory / TRACKER).unlink()
    (directory / TRACKED).unlink()


#: name -> (damage, pattern of the log line). The load reads iteration 2 in every case.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "data of one rank flipped": (
        lambda d: flip(shard(d, 1)),
        r"rank_00001\.safetensors, chunk",
    ),
    "data of two ranks flipped": (
        lambda d: (flip(shard(d, 0)), flip(shard(d, 1))),
        r"rank_0000[01]\.safetensors, chunk 0",
    ),
    "shard cut short": (lambda d: os.truncate(shard(d, 1), 5000), r"rank_00001.*bytes long"),
    "shard missing": (lambda d: shard(d, 1).unlink(), r"rank_00001.*is missing"),
    "shard a directory": (lambda d: put(shard(d, 0), Path.mkdir), r"a directory stands where"),
    "manifest flipped": (lambda d: flip(manifest(d)), r"\.end: "),
    "manifest missing": (lambda d: manifest(d).unlink(), r"holds no end of a save"),
    "common flipped": (lambda d: flip(common(d)), r"common\.msgpack: digest"),
    "directory gone": (lambda d: shutil.rmtree(d / NEWEST), r"holds no end of a save"),
    "directory a file": (
        lambda d: (shutil.rmtree(d / NEWEST), (d / NEWEST).write_text("x")),
        r"a file stands where a directory should be",
    ),
    "tracker to nowhere": (
        lambda d: (d / TRACKER).write_text("77"),
        r"iter_0000077.*was not committed",
    ),
    "tracker garbage": (lambda d: (d / TRACKER).write_bytes(b"\0\xff4"), r"is no iteration"),
}
#: In these cases the newest checkpoint is intact, and the load finds it.
ONLY_TRACKER = [name for name in DAMAGE if name.startswith("tracker")]
#: name -> (damage, arguments and settings of the case, error class, pattern of its message)
REFUSED: dict[str, tuple[Callable[[Path], object], dict, str, str]] = {
    "configured to stop": (
        lambda d: flip(shard(d, 1)),
        {"config": {"damaged": "stop"}},
        "CorruptCheckpointError",
        r"rank_00001\.safetensors, chunk 0",
    ),
    "configured to stop, tracker": (
        lambda d: (d / TRACKER).write_text("?"),
        {"config": {"damaged": "stop"}},
        "CorruptCheckpointError",
        r"'\?' is no iteration; write 4 ",
    ),
    "asked for by number": (
        lambda d: flip(shard(d, 1)),
        {"args": {"ckpt_step": 4}},
        "CorruptCheckpointError",
        r"rank_00001\.safetensors, chunk 0",
    ),
    "to be tuned": (
        lambda d: flip(shard(d, 1)),
        {"args": {"finetune": True}},
        "CorruptCheckpointError",
        r"rank_00001\.safetensors, chunk 0",
    ),
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
    "a stale handle": ({"errno": errno.ESTALE, "times": 1}, 4),
    "an error that lasts": ({"errno": errno.EIO, "times": 1000}, 2),
    "a file that is gone": ({"errno": errno.ESTALE, "times": 1000}, 2),
}
AWAY = "storage that is away"
#: name -> (change of the load directory, further fields of the case). The job may also finetune the
#: model of another directory; the load resumes from iteration 4 in every case.
NOT_PRETRAINED: dict[str, tuple[Callable[[Path], object], dict]] = {
    "a commit that no tracker names yet": (without_tracker, {}),
    "a tracker that one rank does not see": (lambda d: None, {"no_tracker_on": 1}),
}


class CasesJob:
    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.good = tmp_path / "good"
        self.saved = self.train("save", self.good, "--exit-interval", "4")
        self.before: dict[str, dict] = {}
        cases = [self._case("older", None, {"args": {"ckpt_step": 2}})]
        cases += [self._case("newest", None, {})]
        cases += [self._case(name, damage, {}) for name, (damage, _) in DAMAGE.items()]
        for name, (trouble, _) in {
            **TROUBLE,
            AWAY: ({"errno": errno.ETIMEDOUT, "times": 1000}, 0),
        }.items():
            where = {"on": 1, "name": f"{NEWEST}/", **trouble}
            cases.append(self._case(name, None, {}) | {"trouble": where})
        cases += [self._case(name, tell, more) for name, (tell, more, *_) in REFUSED.items()]
        pretrained = {"args": {"pretrained_checkpoint": str(self.good)}}
        for name, (change, more) in NOT_PRETRAINED.items():
            cases.append(self._case(name, change, pretrained | more))
        self.result = run_cases(tmp_path, "cases", MODEL, cases, ranks=RANKS)

    def train(self, name: str, save: Path, *more: str) -> Result:
        arguments = [*MODEL, "--save", str(save), "--load", str(save), *more]
        env = {"FLASHCKPT_SHARE_READS": "always"}
        return succeeded(run_job(self.tmp_path, name, arguments, ranks=RANKS, env=env))

    def _case(self, name: str, damage: Callable[[Path], object] | None, more: dict) -> dict:
        directory = self.tmp_path / name.replace(" ", "_")
        shutil.copytree(self.good, directory)
        if damage is not None:
            damage(directory)
        self.before[name] = snapshot(directory)
        config = {"share_reads": "always", **more.get("config", {})}
        args = {"load": str(directory), **more.get("args", {})}
        return {**more, "name": name, "call": "load", "args": args, "config": config}

    def after(self, name: str) -> dict:
        return snapshot(self.tmp_path / name.replace(" ", "_"))

    def of(self, name: str) -> list[dict]:
        events = self.result.named(name)
        assert [event["rank"] for event in events] == list(range(RANKS))
        return events

    def states(self, name: str) -> list[str]:
        return [event["state"] for event in self.of(name)]

    def blocks(self, name: str) -> list[str]:
        """Return the multi-line warnings about the directory of a case."""
        place = re.escape(str(self.tmp_path / name.replace(" ", "_")))
        return re.findall(
            rf"^={{60,}}\nDAMAGED CHECKPOINT in {place}\n(.*?)\n={{60,}}$",
            self.result.log,
            re.MULTILINE | re.DOTALL,
        )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> CasesJob:
    return CasesJob(tmp_path_factory.mktemp("fall_back"))


@pytest.mark.parametrize("name", DAMAGE)
def test_all_ranks_load_the_intact_checkpoint_and_no_damaged_state(
    ran: CasesJob, name: str
) -> None:
    expected = "newest" if name in ONLY_TRACKER else "older"
    for event in ran.of(name):
        assert (event["error"], event["result"]) == (None, 4 if expected == "newest" else 2)
    assert ran.states(name) == ran.states(expected)
    assert ran.after(name) == ran.before[name]


@pytest.mark.parametrize("name", DAMAGE)
def test_the_log_names_damage_and_lost_iterations_once(ran: CasesJob, name: str) -> None:
    (message,) = ran.blocks(name)
    assert re.search(DAMAGE[name][1], message), message
    match = re.search(
        r"TRAINING RESUMES FROM ITERATION (\d) in storage: (.*)$", message, re.MULTILINE
    )
    assert match is not None, message
    lost = {
        "tracker to nowhere": "at most 73 iterations are lost",
        "manifest missing": "at most 2 iterations are lost",
        "directory gone": "at most 2 iterations are lost",
        "directory a file": "at most 2 iterations are lost",
    }.get(name, "nothing is lost" if name in ONLY_TRACKER else "2 iterations are lost")
    assert match.groups() == ("4" if name in ONLY_TRACKER else "2", lost)


@pytest.mark.parametrize("name", REFUSED)
def test_every_refused_load_stops_all_ranks_equally(ran: CasesJob, name: str) -> None:
    _, _, error, says = REFUSED[name]
    for event in ran.of(name):
        assert event["error"] is not None, "the load succeeded without an error"
        assert event["error"][0] == error
        assert re.search(says, event["error"][1]), event["error"][1]
    assert ran.blocks(name) == []
    assert ran.after(name) == ran.before[name]


@pytest.mark.parametrize("name", TROUBLE)
def test_a_passing_error_loses_no_iteration(ran: CasesJob, name: str) -> None:
    _, loaded = TROUBLE[name]
    for event in ran.of(name):
        assert (event["error"], event["result"]) == (None, loaded)
    assert ran.states(name) == ran.states("newest" if loaded == 4 else "older")
    assert len(ran.blocks(name)) == (loaded == 2)
    place = re.escape(str(ran.tmp_path / name.replace(" ", "_")))
    retries = re.findall(rf"{place}/.*; retry (\d+) in", ran.result.log)
    assert "1" in retries


def test_unavailable_storage_stops_all_ranks_and_loses_no_iteration(ran: CasesJob) -> None:
    for event in ran.of(AWAY):
        assert event["error"] is not None
        assert event["error"][0] == "StorageError"
        assert NEWEST in event["error"][1]
        assert "storage is unavailable: check" in event["error"][1]
    assert ran.blocks(AWAY) == []


@pytest.mark.parametrize("name", NOT_PRETRAINED)
def test_a_job_that_has_a_checkpoint_does_not_start_from_the_pretrained_one(
    ran: CasesJob, name: str
) -> None:
    for event in ran.of(name):
        assert (event["error"], event["result"]) == (None, 4)
    assert ran.states(name) == ran.states("newest")


def test_a_job_on_a_damaged_directory_trains_as_from_the_older_checkpoint(ran: CasesJob) -> None:
    damaged, older = ran.tmp_path / "D", ran.tmp_path / "C"
    shutil.copytree(ran.good, damaged)
    truncated_copy(ran.good, older, 2)
    flip(shard(damaged, 1))
    result, expected = ran.train("d", damaged), ran.train("c", older)
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


def change_in_memory(runtime_dir: Path, iteration: int) -> None:
    """Flip a bit in the agent's slot of `iteration`."""
    (agent,) = agents_under(runtime_dir)
    # An agent has several descriptors of one slab.
    links = [fd for fd in Path(f"/proc/{agent}/fd").iterdir() if "memfd:" in os.readlink(fd)]
    slab = Slab.attach(os.open(links[0], os.O_RDWR))
    (slot,) = (slot for slot in slab.slots if slot.header.iteration == iteration)
    with slot.data() as data:
        data[len(data) // 2] ^= 4
    slab.close()


def test_a_slot_that_changed_in_memory_is_not_restored(tmp_path: Path) -> None:
    def train(name: str, save: Path, **env: str) -> Result:
        arguments = [*MODEL, "--save", str(save), "--load", str(save)]
        patient = {"FLASHCKPT_AGENT__GRACE_S": "240"}
        return run_job(tmp_path, name, arguments, ranks=1, env={**patient, **env})

    assert train("crash", tmp_path / "A", KILL="0:6").returncode != 0
    await_tracker(tmp_path / "A", 4)
    truncated_copy(tmp_path / "A", tmp_path / "C", 4)
    change_in_memory(tmp_path / "run", 4)
    restarted = succeeded(train("again", tmp_path / "A"))
    expected = succeeded(train("storage", tmp_path / "C"))
    assert "iteration 4 was not restored from memory: slot" in restarted.log
    assert "host memory changed after it was" in restarted.log
    assert "TRAINING RESUMES FROM ITERATION 4 in storage: nothing is lost" in restarted.log
    assert "iteration 4 was restored from storage" in restarted.log
    assert restarted.losses() == expected.losses()
    assert differing(tensors(tmp_path / "A", 6), tensors(tmp_path / "C", 6)) == []
