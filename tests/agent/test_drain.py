"""The end of a job: the wait for its last save is limited, and the agent still writes the save."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_flashckpt.agent.connecting import connect
from megatron_flashckpt.config import Config
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.save import session as session_module
from tests.agent.conftest import Node
from tests.support.histories import saves_in
from tests.support.rank_job import Job, session_of
from tests.support.trainer import (
    PATIENCE_S,
    blocked_shard,
    eventually,
    is_alive,
    new_save_id,
    remove_tree,
)


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the end of a session find arguments of Megatron."""
    monkeypatch.setattr(session_module, "get_args", SimpleNamespace)


@pytest.mark.usefixtures("args")
def test_a_drain_timeout_changes_the_exit_status_and_the_agent_continues(
    node: Node, root: Path, make_job: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(runtime_dir=str(node.runtime_dir), drain_timeout_s=0.3)
    job = make_job(config)
    session, reports = session_of(job, config)
    with blocked_shard(root, 1, 0, job.save_id(1)) as unblock:
        reports.requested(1)
        job.stage(1)
        (agent,) = node.agents()
        assert not session.end(), "the exit status is 1"
        assert "not committed within 0 s; the agent keeps trying; raise 'drain_timeout_s'" in (
            caplog.text
        )
        assert is_alive(agent)
        unblock()
        eventually("the end of the agent", lambda: not is_alive(agent))
    assert (root / file_names.TRACKER).read_text() == "1"
    job.assert_stored(root, 1)


@pytest.mark.usefixtures("args")
def test_the_end_of_a_job_asks_no_other_rank_and_not_their_store(
    job: Job, node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, whose process may hold the rendezvous store, has ended. Memory has the last state."""
    assert job.save(1) is None
    job.stage(2, memory_only=True)
    session, reports = session_of(job, node.config())
    reports.requested(2)
    session._open[str(root)].unwritten = 2

    def gone(*_: object, **__: object) -> None:
        raise dist.DistNetworkError("connection closed")

    for name in ("_get_default_store", "_get_default_group"):
        monkeypatch.setattr(dist.distributed_c10d, name, gone)
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 1)):
        monkeypatch.setattr(dist, name, lambda *_, value=value: value)
    assert session.end(), "the exit status is 0"
    assert (root / file_names.TRACKER).read_text() == "2"
    job.assert_stored(root, 2)


@pytest.mark.parametrize("left", ["manifest", "history", "nothing"])
def test_a_wait_without_a_pending_save_ends_by_a_read_of_storage(
    job: Job, node: Node, root: Path, left: str
) -> None:
    job.stage(1)
    eventually("the commit", lambda: saves_in(root))
    connect(str(root), 0, 0, node.config(), threading.Event()).close()
    if left != "manifest":
        remove_tree(root / file_names.iteration_dir(1))
    if left == "nothing":
        remove_tree(root / file_names.HISTORY)
    (outcome,) = job.checkpointer.wait(10 * PATIENCE_S)
    assert not job.checkpointer.pending
    if left == "nothing":
        assert f"{root}/{file_names.iteration_dir(1)}: does not hold this save, and the agent" in (
            outcome.error or ""
        )
    else:
        assert outcome.error is None
    assert job.save(2) is None


def test_a_save_that_the_agent_still_writes_is_not_searched_in_storage(
    job: Job, node: Node, root: Path
) -> None:
    with blocked_shard(root, 1, 0, job.save_id(1)) as unblock:
        job.stage(1)
        # From now on, the agent reports no result to this connection.
        connect(str(root), 0, 0, node.config(), threading.Event()).close()
        assert job.checkpointer.saves.poll() == []
        assert job.checkpointer.pending
        unblock()
        (outcome,) = job.checkpointer.wait(10 * PATIENCE_S)
    assert outcome.error is None


def test_a_replaced_process_reports_its_failed_saves_without_a_wait(
    job: Job, node: Node, root: Path
) -> None:
    assert job.save(1) is None
    session, reports = session_of(job, node.config())
    with blocked_shard(root, 2, 0, job.save_id(2)):
        job.stage(2)
        later = node.process(root, iterations=[3], save_id=new_save_id(), stop="staged")
        later.stopped()
        for iteration in (2, 4):
            reports.requested(iteration)
            if iteration == 4:
                job.checkpointer.save(job.request(4))
            (outcome,) = job.checkpointer.wait(10 * PATIENCE_S)
            assert outcome.iteration == iteration
            assert f"process {later.process.pid} of the same rank" in (outcome.error or "")
            reports.failed(outcome)
        assert not session.end(), "the exit status is 1"
