"""A commit cut short between its end and the tracker counts as a commit."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from megatron_flashckpt.errors import AgentError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.load.named_checkpoint import loadable_saves
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.support.trainer import eventually, is_alive, new_save_id


@pytest.fixture
def cut_short(
    node: Node, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PosixStore:
    """Commit iteration 10; of iteration 20 only the tracker is missing, because the agent died."""
    fault = f"agent:commit.end:2:KILL:{tmp_path / 'reached'}"
    monkeypatch.setenv("FLASHCKPT_FAULT", fault)
    trainer = node.trainer(root)
    agent = trainer.client.agent_pid
    assert trainer.save(10).error is None
    with contextlib.suppress(AgentError):  # the agent may die before it answers
        trainer.stage(20, new_save_id())
    eventually("the end of the agent", lambda: not is_alive(agent))
    assert (root / file_names.TRACKER).read_text() == "10"
    return PosixStore(root)


def resumed(store: PosixStore, step: int | None = None) -> int:
    return loadable_saves(store, step)[0].iteration


def test_a_job_resumes_from_a_commit_without_its_tracker(cut_short: PosixStore) -> None:
    assert resumed(cut_short) == 20
    cut_short.delete([file_names.TRACKER, file_names.TRACKED])
    assert resumed(cut_short) == 20, "this also holds for the first commit of a job"


def test_a_named_iteration_is_loaded(cut_short: PosixStore) -> None:
    assert resumed(cut_short, 10) == 10
