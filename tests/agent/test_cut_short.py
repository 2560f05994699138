"""A commit cut short between manifest and tracker: it counts as a commit, and no other one does."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.load.named_checkpoint import named_in
from megatron_flashckpt.storage.posix import PosixStorage
from tests.agent.conftest import Node
from tests.support.trainer import eventually, is_alive, new_save_id


@pytest.fixture
def cut_short(
    node: Node, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PosixStorage:
    """Commit iteration 10; of iteration 20 only the tracker is missing, because the agent died."""
    fault = f"agent:commit.manifest:2:KILL:{tmp_path / 'reached'}"
    monkeypatch.setenv("FLASHCKPT_FAULT", fault)
    trainer = node.trainer(root)
    agent = trainer.client.agent_pid
    assert trainer.save(10).error is None
    with contextlib.suppress(AgentError):  # the agent may die before it answers
        trainer.stage(20, new_save_id())
    eventually("the end of the agent", lambda: not is_alive(agent))
    assert (root / file_names.TRACKER).read_text() == "10"
    return PosixStorage(root)


def records(storage: PosixStorage, iteration: int) -> list[Path]:
    return sorted((Path(storage.place) / file_names.iteration_dir(iteration)).glob("*.commit"))


def test_a_job_resumes_from_a_commit_without_its_tracker(cut_short: PosixStorage) -> None:
    assert named_in(cut_short, None).iteration == 20
    (Path(cut_short.place) / file_names.TRACKER).unlink()
    assert named_in(cut_short, None).iteration == 20, (
        "this also holds for the first commit of a job"
    )


def test_a_named_iteration_is_loaded(cut_short: PosixStorage) -> None:
    assert named_in(cut_short, 10).iteration == 10


def test_a_tracker_that_was_set_back_by_hand_is_obeyed(cut_short: PosixStorage) -> None:
    for record in records(cut_short, 20):  # a complete commit removes its records, too
        record.unlink()
    assert named_in(cut_short, None).iteration == 10


def test_a_tracker_set_back_by_hand_is_obeyed_if_an_agent_left_its_records(
    cut_short: PosixStorage,
) -> None:
    tracker = Path(cut_short.place) / file_names.TRACKER
    manifest = tracker.parent / file_names.iteration_dir(20) / file_names.MANIFEST
    written_ns = manifest.stat().st_mtime_ns + 1
    os.utime(tracker, ns=(written_ns, written_ns))
    assert named_in(cut_short, None).iteration == 10


def test_records_of_a_later_attempt_do_not_count(cut_short: PosixStorage) -> None:
    (record,) = records(cut_short, 20)
    record.rename(record.with_name(file_names.record_name(0, new_save_id())))
    assert named_in(cut_short, None).iteration == 10


def test_damaged_manifests_and_older_records_do_not_count(cut_short: PosixStorage) -> None:
    root = Path(cut_short.place)
    (root / file_names.TRACKER).write_text("30")
    assert named_in(cut_short, None).iteration == 30
    (root / file_names.TRACKER).write_text("10")
    (root / file_names.iteration_dir(20) / file_names.MANIFEST).write_text("{}")
    assert named_in(cut_short, None).iteration == 10
