"""Records of past saves in a save directory: manifests and the history."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import msgspec
import pytest

from megatron_flashckpt.catalog import history
from megatron_flashckpt.catalog.history import PastSave
from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.file_names import HISTORY
from megatron_flashckpt.layout.save_cost import RankCost, SaveCost, combine
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.agent.test_client import kill_agent
from tests.support.trainer import blocked_open, new_save_id


def saves_in(root: Path) -> list[PastSave]:
    return history.read(PosixStorage(root))


def past(iteration: int) -> PastSave:
    return PastSave(
        iteration=iteration, save_id=new_save_id(), ended_at=1.0, seconds=2.0, world_size=4
    )


def test_manifest_and_history_hold_the_timings_of_a_save(node: Node, root: Path) -> None:
    trainers = [node.trainer(root, rank, 2) for rank in range(2)]
    save_id, called = new_save_id(), time.time()
    for trainer, blocked_s in zip(trainers, (0.25, 0.125), strict=True):
        cost = RankCost(started_at=called, blocked_s=blocked_s, staged_s=1 - blocked_s)
        trainer.stage(7, save_id, cost=cost)
    outcomes = [trainer.outcome() for trainer in trainers]
    storage = PosixStorage(root)
    manifest = StoredCheckpoint(storage, 7, read_manifest(storage, 7)).manifest
    timings = manifest.cost
    assert timings is not None
    assert (timings.blocked_s, timings.staged_s, timings.started_at) == (0.25, 0.875, called)
    assert timings.nbytes == sum(shard.nbytes for shard in manifest.shards)
    assert 0 < timings.persisted_s <= timings.durable_s <= time.time() - called
    assert timings.slowest in (0, 1)
    assert [outcome.cost for outcome in outcomes] == [timings, timings]
    (line,) = saves_in(root)
    assert (line.iteration, line.save_id, line.error, line.world_size) == (7, save_id, None, 2)
    assert line.cost == timings


def test_a_history_that_is_too_long_to_read_keeps_the_last_saves(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, no new save was recorded any more."""
    monkeypatch.setattr(history, "_MAX_NBYTES", 1000)
    for iteration in range(1, 31):
        history.append(PosixStorage(root), past(iteration), 10**9)
        assert saves_in(root)[-1].iteration == iteration
    assert (root / HISTORY).stat().st_size < 1500
    assert [save.iteration for save in saves_in(root)] == list(range(31 - len(saves_in(root)), 31))


def test_a_failed_save_is_in_the_history_with_its_reason(node: Node, root: Path) -> None:
    trainer = node.trainer(root)
    trainer.save(1)
    save_id = new_save_id()
    trainer.stage(2, save_id)
    assert trainer.outcome().error is None
    # A directory in place of a shard makes the third save fail.
    (root / "iter_0000003").write_text("not a directory")
    failed = trainer.save(3)
    assert failed.error is not None
    assert [(line.iteration, line.error) for line in saves_in(root)] == [
        (1, None),
        (2, None),
        (3, failed.error),
    ]


def test_a_node_that_does_not_commit_also_gets_the_timings_of_all_ranks(
    node: Node, other_node: Node, root: Path
) -> None:
    trainers = [node.trainer(root, 0, 2), other_node.trainer(root, 1, 2)]
    save_id = new_save_id()
    for trainer, blocked_s in zip(trainers, (0.25, 0.5), strict=True):
        cost = RankCost(started_at=time.time(), blocked_s=blocked_s, staged_s=1.0)
        trainer.stage(7, save_id, cost=cost)
    costs = [trainer.outcome().cost for trainer in trainers]
    assert costs[0] == costs[1]
    assert costs[0] is not None
    assert costs[0].blocked_s == 0.5
    assert len(saves_in(root)) == 1


def test_the_history_keeps_the_newest_lines_and_may_be_turned_off(node: Node, root: Path) -> None:
    storage = PosixStorage(root)
    for iteration in range(5):
        history.append(storage, past(iteration), 3)
    assert [line.iteration for line in saves_in(root)] == [2, 3, 4]
    other = root.with_name("other")
    quiet = msgspec.structs.replace(node.config(), history=0)
    assert node.trainer(other, config=quiet).save(1).error is None
    assert not (other / HISTORY).exists()


def test_invalid_history_lines_are_skipped_and_an_unwritable_history_fails_no_save(
    node: Node, root: Path
) -> None:
    root.mkdir()
    (root / HISTORY).write_bytes(b"\xff\xfe\n{\n" + msgspec.json.encode(past(9)) + b"\n[]\n")
    assert [line.iteration for line in saves_in(root)] == [9]
    (root / HISTORY).unlink()
    (root / HISTORY).mkdir()
    assert node.trainer(root).save(1).error is None


def test_timings_are_those_of_the_slowest_rank_and_need_rank_0() -> None:
    costs = {
        rank: RankCost(started_at=10.0, blocked_s=0.1 * rank, staged_s=1.0, persisted_s=2.0 + rank)
        for rank in range(3)
    }
    assert combine(costs, 500, 16.0) == SaveCost(
        nbytes=500,
        started_at=10.0,
        blocked_s=0.2,
        staged_s=1.0,
        persisted_s=4.0,
        slowest=2,
        durable_s=6.0,
    )
    del costs[0]
    assert combine(costs, 500, 16.0) is None


def test_a_save_is_durable_no_earlier_than_its_last_shard() -> None:
    # Rank 1 called 5 ms before rank 0, or the clock of its node is 5 ms behind.
    costs = {
        rank: RankCost(started_at=started_at, blocked_s=0.0, staged_s=0.01, persisted_s=0.03)
        for rank, started_at in ((0, 10.005), (1, 10.0))
    }
    combined = combine(costs, 500, 10.034)
    assert combined is not None
    assert combined.durable_s == combined.persisted_s == 0.03


def test_the_agent_gets_the_settings_history_and_trace() -> None:
    from megatron_flashckpt.agent.state import AgentOptions

    assert {"history", "trace"} <= set(AgentOptions.__struct_fields__)
    assert Config().history > 0


def _replace_history(root: Path, what: str) -> None:
    """Put something else in the history's place."""
    path = root / HISTORY
    path.unlink(missing_ok=True)
    match what:
        case "link":
            (root / "elsewhere").write_bytes(b"")
            path.symlink_to(root / "elsewhere")
        case "link to nothing":
            path.symlink_to(root / "nothing")
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "text":
            path.write_bytes(b"\xff no JSON\n{}\n")


@pytest.mark.parametrize("what", ["link", "link to nothing", "directory", "pipe", "text"])
def test_no_save_fails_because_of_the_history(node: Node, root: Path, what: str) -> None:
    """Also of a save that was staged with an agent that was killed, which looks into it."""
    trainer = node.trainer(root)
    assert trainer.save(1).error is None
    save_id = new_save_id()
    with blocked_open(root / file_names.iteration_dir(2) / file_names.shard_name(0, save_id)):
        trainer.stage(2, save_id)
        kill_agent(trainer.client.agent_pid)
        _replace_history(root, what)
    trainer.reconnect()
    assert trainer.outcome().error is None
    assert trainer.save(3).error is None
    assert (root / file_names.TRACKER).read_text() == "3"
    if what != "text":
        assert history.read(PosixStorage(root)) == []
        assert (root / HISTORY).is_file() == (what == "link"), "what stands there stays"


def test_only_errors_of_the_history_that_may_pass_are_raised(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user may have no permission to read it, and storage may be away for a moment."""
    history.append(PosixStorage(root), past(1), 10)

    def refuse(number: int) -> None:
        def read(*_: object) -> bytes:
            raise StorageError(number, os.strerror(number))

        monkeypatch.setattr(PosixStorage, "read", read)

    refuse(errno.EACCES)
    assert history.past_save(PosixStorage(root), "x") is None
    assert "the history of saves cannot be read" in caplog.text
    refuse(errno.ETIMEDOUT)
    with pytest.raises(StorageError):
        history.past_save(PosixStorage(root), "x")
