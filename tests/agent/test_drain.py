"""The end of a job: the wait for its last save is limited, and the agent still writes the save."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.agent.connecting import connect
from megatron_flashckpt.catalog import history
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.config import Config
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.file_format.file_names import save_name
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.save.checkpointer import Checkpointer, SaveRequest
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.agent.conftest import Node
from tests.support.stored import stored
from tests.support.trainer import (
    PATIENCE_S,
    blocked_open,
    eventually,
    is_alive,
    new_save_id,
    remove_tree,
)


def test_a_drain_timeout_names_its_setting_and_the_agent_continues(
    node: Node,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A save of one rank without a model; the saved data is the side state."""
    monkeypatch.setattr(parallel, "coordinates", Coordinates)
    config = Config(runtime_dir=str(node.runtime_dir), drain_timeout_s=0.3)
    job = Checkpointer(str(root), config)
    with blocked_open(shard_of(job, root, 1)) as unblock:
        job.save(request(1))
        job.link.stager.wait()
        (outcome,) = job.wait()
        assert (outcome.iteration, job.pending) == (1, False)
        assert "not committed within 0 s; the agent keeps trying; raise 'drain_timeout_s'" in (
            outcome.error or ""
        )
        (agent,) = node.agents()
        job.close()
        assert is_alive(agent)
        unblock()
        eventually("the end of the agent", lambda: not is_alive(agent))
    assert (root / file_names.TRACKER).read_text() == "1"
    assert verify(stored(root, 1)) == []


@pytest.fixture
def job(node: Node, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpointer]:
    """A rank without a model, which waits for its saves for half an hour."""
    monkeypatch.setattr(parallel, "coordinates", Coordinates)
    made = Checkpointer(str(root), node.config())
    yield made
    made.close(leave=False)


def shard_of(job: Checkpointer, root: Path, iteration: int) -> Path:
    """Return the shard of a job that saves every iteration from 1."""
    job.runs.ensure()
    assert job.runs.run.name is not None
    save_id = save_name(job.runs.run.name, iteration)
    return root / file_names.iteration_dir(iteration) / file_names.shard_name(0, save_id)


def request(iteration: int) -> SaveRequest:
    args = argparse.Namespace(no_save_rng=True)
    return SaveRequest(iteration, chunks=[], optimizer=None, args=args)


@pytest.mark.parametrize("left", ["manifest", "history", "nothing"])
def test_a_wait_without_a_pending_save_ends_by_a_read_of_storage(
    job: Checkpointer, node: Node, root: Path, left: str
) -> None:
    job.save(request(1))
    job.link.stager.wait()
    eventually("the commit", lambda: history.read(PosixStore(root)))
    connect(str(root), 0, 0, node.config()).close()
    if left != "manifest":
        remove_tree(root / file_names.iteration_dir(1))
    if left == "nothing":
        (root / file_names.HISTORY).unlink()
    (outcome,) = job.wait(10 * PATIENCE_S)
    assert not job.pending
    if left == "nothing":
        assert f"{root}/{file_names.iteration_dir(1)}: does not hold this save, and the agent" in (
            outcome.error or ""
        )
    else:
        assert outcome.error is None
    job.save(request(2))
    (outcome,) = job.wait()
    assert (outcome.iteration, outcome.error) == (2, None)


def test_a_save_that_the_agent_still_writes_is_not_searched_in_storage(
    job: Checkpointer, node: Node, root: Path
) -> None:
    with blocked_open(shard_of(job, root, 1)) as unblock:
        job.save(request(1))
        job.link.stager.wait()
        # From now on, the agent reports no result to this connection.
        connect(str(root), 0, 0, node.config()).close()
        assert job.saves.poll() == []
        assert job.pending
        unblock()
        (outcome,) = job.wait(10 * PATIENCE_S)
    assert outcome.error is None


def test_a_replaced_process_reports_its_failed_saves_without_a_wait(
    job: Checkpointer, node: Node, root: Path
) -> None:
    assert job.save(request(1)).refusal is None
    assert [outcome.error for outcome in job.wait()] == [None]
    with blocked_open(shard_of(job, root, 2)):
        job.save(request(2))
        job.link.stager.wait()
        later = node.process(root, iterations=[3], save_id=new_save_id(), stop="staged")
        later.stopped()
        for iteration in (2, 4):
            if iteration == 4:
                job.save(request(4))
            (outcome,) = job.wait(10 * PATIENCE_S)
            assert outcome.iteration == iteration
            assert f"process {later.process.pid} of the same rank" in (outcome.error or "")
