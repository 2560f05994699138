"""The end of a job: its last save is awaited, for so long, and is not lost when that runs out."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.agent.client import connect
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import ConfigError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.save import run_id
from megatron_flashckpt.save.checkpointer import Checkpointer, SaveRequest
from tests.agent.conftest import Node
from tests.agent.test_shard_writer import stored
from tests.support.trainer import PATIENCE_S, eventually, held_back, is_alive, remove_tree

RUN = "0123abcd"


def test_a_drain_that_runs_out_is_a_failure_with_its_setting_and_the_agent_goes_on(
    node: Node,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank without a model: what it saves is its side state."""
    monkeypatch.setattr(parallel, "coordinates", Coordinates)
    monkeypatch.setattr(run_id, "from_store", lambda root: RUN)
    config = Config(runtime_dir=str(node.runtime_dir), drain_timeout_s=0.3)
    job = Checkpointer(str(root), config)
    with held_back(
        root / file_names.iteration_dir(1) / file_names.shard_name(0, f"{RUN}0000")
    ) as let_go:
        job.save(request(1))
        (outcome,) = job.wait()
        assert (outcome.iteration, job.pending) == (1, False)
        assert "not committed within 0 s; the agent keeps trying; raise 'drain_timeout_s'" in (
            outcome.error or ""
        )
        (agent,) = node.agents()
        job.close()
        assert is_alive(agent)
        let_go()
        eventually("the end of the agent", lambda: not is_alive(agent))
    assert (root / file_names.TRACKER).read_text() == "1"
    assert verify(stored(root, 1)) == []


@pytest.fixture
def job(node: Node, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpointer]:
    """One rank without a model, which would wait for its saves for half an hour."""
    monkeypatch.setattr(parallel, "coordinates", Coordinates)
    monkeypatch.setattr(run_id, "from_store", lambda root: RUN)
    made = Checkpointer(str(root), node.config())
    yield made
    made.close(leave=False)


def request(iteration: int) -> SaveRequest:
    args = argparse.Namespace(no_save_rng=True)
    return SaveRequest(iteration, chunks=[], optimizer=None, args=args)


@pytest.mark.parametrize("left", ["manifest", "history", "nothing"])
def test_an_agent_that_owes_no_outcome_ends_the_wait_by_a_look_into_storage(
    job: Checkpointer, node: Node, root: Path, left: str
) -> None:
    job.save(request(1))
    job.link.stager.wait()
    eventually("the commit", lambda: (root / file_names.HISTORY).exists())
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


def test_a_save_that_its_agent_still_writes_is_not_looked_for_in_storage(
    job: Checkpointer, node: Node, root: Path
) -> None:
    with held_back(
        root / file_names.iteration_dir(1) / file_names.shard_name(0, f"{RUN}0000")
    ) as let_go:
        job.save(request(1))
        job.link.stager.wait()
        # From now on the agent tells this connection nothing.
        connect(str(root), 0, 0, node.config()).close()
        assert job.saves.poll() == []
        assert job.pending
        let_go()
        (outcome,) = job.wait(10 * PATIENCE_S)
    assert outcome.error is None


def test_a_replaced_process_says_why_its_saves_fail_and_waits_for_none(
    job: Checkpointer, node: Node, root: Path
) -> None:
    assert job.save(request(1)).refusal is None
    assert [outcome.error for outcome in job.wait()] == [None]
    with held_back(root / file_names.iteration_dir(2) / file_names.shard_name(0, f"{RUN}0001")):
        job.save(request(2))
        job.link.stager.wait()
        later = node.process(root, iterations=[3], save_id="b" * 12, stop="staged")
        later.stopped()
        for iteration in (2, 4):
            if iteration == 4:
                job.save(request(4))
            (outcome,) = job.wait(10 * PATIENCE_S)
            assert outcome.iteration == iteration
            assert f"process {later.process.pid} of the same rank" in (outcome.error or "")


def test_a_save_directory_that_is_none_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"s3://bucket/job: .*mount the store"):
        Checkpointer("s3://bucket/job", Config())
    assert list(tmp_path.iterdir()) == []
