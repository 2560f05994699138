"""The end of a job: the wait for its last save is limited, and the agent still writes the save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.agent.connecting import connect
from megatron_flashckpt.config import Config
from megatron_flashckpt.file_format import file_names
from tests.agent.conftest import Node
from tests.support.histories import saves_in
from tests.support.rank_job import Job
from tests.support.trainer import (
    PATIENCE_S,
    blocked_shard,
    eventually,
    is_alive,
    new_save_id,
    remove_tree,
)


def test_a_drain_timeout_names_its_setting_and_the_agent_continues(
    node: Node, root: Path, make_job: Any
) -> None:
    job = make_job(Config(runtime_dir=str(node.runtime_dir), drain_timeout_s=0.3))
    with blocked_shard(root, 1, 0, job.save_id(1)) as unblock:
        job.stage(1)
        (outcome,) = job.checkpointer.wait()
        assert (outcome.iteration, job.checkpointer.pending) == (1, False)
        assert "not committed within 0 s; the agent keeps trying; raise 'drain_timeout_s'" in (
            outcome.error or ""
        )
        (agent,) = node.agents()
        job.checkpointer.close()
        assert is_alive(agent)
        unblock()
        eventually("the end of the agent", lambda: not is_alive(agent))
    assert (root / file_names.TRACKER).read_text() == "1"
    job.assert_stored(root, 1)


@pytest.mark.parametrize("left", ["manifest", "history", "nothing"])
def test_a_wait_without_a_pending_save_ends_by_a_read_of_storage(
    job: Job, node: Node, root: Path, left: str
) -> None:
    job.stage(1)
    eventually("the commit", lambda: saves_in(root))
    connect(str(root), 0, 0, node.config()).close()
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
        connect(str(root), 0, 0, node.config()).close()
        assert job.checkpointer.saves.poll() == []
        assert job.checkpointer.pending
        unblock()
        (outcome,) = job.checkpointer.wait(10 * PATIENCE_S)
    assert outcome.error is None


def test_a_replaced_process_reports_its_failed_saves_without_a_wait(
    job: Job, node: Node, root: Path
) -> None:
    assert job.save(1) is None
    with blocked_shard(root, 2, 0, job.save_id(2)):
        job.stage(2)
        later = node.process(root, iterations=[3], save_id=new_save_id(), stop="staged")
        later.stopped()
        for iteration in (2, 4):
            if iteration == 4:
                job.checkpointer.save(job.request(4))
            (outcome,) = job.checkpointer.wait(10 * PATIENCE_S)
            assert outcome.iteration == iteration
            assert f"process {later.process.pid} of the same rank" in (outcome.error or "")
