"""`Checkpointer` with a real agent and its own tensors, but no model."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import SaveFailedError, UnsupportedError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.file_format.end import decode_failure
from megatron_flashckpt.memory.runs import Run
from megatron_flashckpt.save import agent_connection, node_link
from megatron_flashckpt.save.node_link import NodeLink
from tests.agent.conftest import Node
from tests.support.rank_job import NUMEL, session_of
from tests.support.trainer import blocked_shard, eventually, kill_agent


@pytest.fixture
def config(node: Node) -> Config:
    return node.config()


@pytest.mark.parametrize("staging", ["deferred", "blocking"])
def test_every_save_is_stored_bit_for_bit(
    make_job: Any, config: Config, root: Path, staging: str
) -> None:
    job = make_job(msgspec.structs.replace(config, staging=staging))
    for iteration in (1, 2, 3):
        assert job.save(iteration) is None
        job.assert_stored(root, iteration)
        for tensor in job.tensors:
            tensor.add_(1)


def test_weights_without_the_optimizer_are_not_written_under_an_earlier_iteration(
    make_job: Any, config: Config, root: Path
) -> None:
    """The end of training writes the last memory-only save, unless the weights have changed."""
    job = make_job(config)
    step = {"step": lambda _: [weight.add_(1.0) for weight in job.tensors]}
    optimizer = type("Optimizer", (), step)()
    job.checkpointer.save(job.request(1, optimizer=optimizer, memory_only=True))
    optimizer.step()
    assert job.checkpointer.write_last() is None
    job.checkpointer.save(job.request(2, optimizer=optimizer, memory_only=True))
    assert job.checkpointer.write_last() is not None
    assert [outcome.error for outcome in job.checkpointer.wait(60.0)] == [None] * 3
    job.assert_stored(root, 2)
    assert not (root / file_names.iteration_dir(1)).exists()


def test_another_agent_reports_no_kept_save_again(make_job: Any, config: Config) -> None:
    job = make_job(config)
    assert job.save(1, memory_only=True) is None
    assert job.save(2, memory_only=True) is None
    former = job.checkpointer.link.client()
    os.kill(former.agent_pid, signal.SIGKILL)
    saves = job.checkpointer.saves
    told: list[Outcome] = []

    def is_replaced() -> bool:
        told.extend(saves.poll())
        return job.checkpointer.link.current not in (None, former)

    eventually("another agent serves the rank", is_replaced)
    assert job.save(3, memory_only=True) is None
    told.extend(saves.poll())
    assert [outcome.iteration for outcome in told if outcome.iteration < 3] == []


def test_a_failed_copy_leaves_no_shard_and_the_next_save_succeeds(
    make_job: Any, config: Config, root: Path
) -> None:
    job = make_job(config)
    whole = job.tensors
    assert job.save(1) is None
    job.tensors = [*whole[:3], torch.empty(NUMEL, device="meta")]  # a meta tensor has no bytes
    error = job.save(2)
    assert error is not None
    assert "copying to host memory failed" in error
    job.tensors = whole
    assert job.save(3) is None
    job.assert_stored(root, 3)
    directory = root / file_names.iteration_dir(2)
    assert not list(directory.glob("*.safetensors"))
    job.assert_stored(root, 1)


def test_a_crash_forgets_no_failure_that_other_nodes_wait_for(
    make_job: Any, config: Config, root: Path
) -> None:
    job = make_job(config)
    save_id = job.save_id(1)
    saves = job.checkpointer.saves
    job.checkpointer.link.ensure_slab(4096, 4096)
    saves.expect(save_id, memory_only=False)
    saves.begin(save_id, 1)
    saves.copies_failed(save_id, SaveFailedError("the GPU is gone"))
    job.checkpointer.abandon()
    end = root / file_names.iteration_dir(1) / file_names.end_name(save_id)
    assert decode_failure(end.read_bytes()).failed == "rank 0: the GPU is gone"


def test_a_retry_in_the_process_waits_for_the_copies_of_an_abandoned_save(
    make_job: Any,
    config: Config,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The agent gives the slot of the abandoned save to the retry."""
    first = make_job(config)
    assert first.save(1) is None
    go, copy = threading.Event(), Run.copy_on_host

    def late(run: Run) -> None:
        if threading.current_thread().name == "flashckpt-stage":
            go.wait(60.0)
        copy(run)

    monkeypatch.setattr(node_link, "ABANDON_S", 0.1)
    monkeypatch.setattr(Run, "copy_on_host", late)
    for tensor in first.tensors:
        tensor.add_(1)
    first.checkpointer.save(first.request(2))
    first.checkpointer.abandon()
    monkeypatch.setattr(Run, "copy_on_host", copy)

    def retry() -> tuple[Any, str | None]:
        second = make_job(config)
        second.checkpointer.link.take_slab()
        return second, second.save(3)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        retrying = pool.submit(retry)
        assert not concurrent.futures.wait([retrying], timeout=2.0).done
        assert (
            "waiting for the copies and preparations of a checkpointer that this process has left"
            in caplog.text
        )
        go.set()
        second, error = retrying.result(60.0)
    assert error is None
    second.assert_stored(root, 3)


def test_an_abandoned_checkpointer_takes_no_agent_from_its_successor(
    make_job: Any, config: Config, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still seeks one when the process begins again."""
    first = make_job(config)
    assert first.save(1) is None
    go, connect = threading.Event(), agent_connection.connect

    def late(*place: Any) -> AgentClient:
        assert go.wait(60.0)
        return connect(*place)

    lost = first.checkpointer.link.client()
    kill_agent(lost.agent_pid)
    monkeypatch.setattr(agent_connection, "connect", late)
    first.checkpointer.link.replace_agent(lost)
    seeking = first.checkpointer.link._background._thread
    first.checkpointer.abandon()
    monkeypatch.setattr(agent_connection, "connect", connect)

    def retry() -> tuple[Any, str | None]:
        second = make_job(config)
        return second, second.save(2)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        retrying = pool.submit(retry)
        concurrent.futures.wait([retrying], timeout=2.0)
        go.set()
        second, error = retrying.result(60.0)
    assert error is None
    seeking.join(60.0)
    assert second.save(3) is None
    second.assert_stored(root, 3)


def test_whoever_interrupts_the_wait_for_an_abandoned_checkpointer_leaves_it_to_the_next(
    make_job: Any,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = make_job(config)
    link, go = first.checkpointer.link, threading.Event()
    link._background.add(lambda: go.wait(60.0))
    first.checkpointer.abandon()

    def wait(wait_s: float | None = None) -> bool:
        if wait_s is None:
            raise KeyboardInterrupt
        return False

    with monkeypatch.context() as patch:
        patch.setattr(link, "wait_idle", wait)
        with pytest.raises(KeyboardInterrupt):
            make_job(config)
    assert "a checkpointer that this process has left" in caplog.text
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        retrying = pool.submit(make_job, config)
        assert not concurrent.futures.wait([retrying], timeout=0.5).done
        go.set()
        assert retrying.result(60.0).save(2) is None


def test_a_left_checkpointer_ends_its_search_for_an_agent_at_once(
    config: Config, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local rank 1 waits for the agent that local rank 0 starts; a restart waits for rank 1."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    link = NodeLink(str(root), 1, config)
    link.prepare(None)
    assert link.is_preparing
    link.abandon()
    assert link.wait_prepared(config.agent.start_timeout_s / 3)


@pytest.mark.parametrize("how", ["closed", "abandoned"])
def test_a_checkpointer_that_was_left_saves_no_more(
    make_job: Any, config: Config, root: Path, how: str
) -> None:
    first = make_job(config)
    assert first.save(1) is None
    if how == "closed":
        first.checkpointer.close(leave=False)
    else:
        first.checkpointer.abandon()
    second = make_job(config)
    assert second.save(2) is None
    first.checkpointer.save(first.request(3))
    (outcome,) = first.checkpointer.saves.poll()
    assert "was closed" in str(outcome.error)
    assert second.save(4) is None
    second.assert_stored(root, 4)


def test_an_agent_that_refuses_one_save_is_not_taken_for_dead(
    make_job: Any,
    config: Config,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = make_job(config)
    checkpointer = job.checkpointer
    checkpointer.save(job.request(1, memory_only=True))
    checkpointer.link.stager.wait()
    client = checkpointer.link.client()
    eventually("the slots are digested", lambda: not any(slab.in_use for slab in client.held()))
    staged = client.staged

    def damaged(index: int, *rest: Any) -> None:
        slab = checkpointer.link._slab
        slab.memory[slab.geometry.meta_offset(index) + 20] ^= 1
        staged(index, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(client, "staged", damaged)
        checkpointer.save(job.request(2))
        checkpointer.link.stager.wait()
    outcomes = {outcome.iteration: outcome for outcome in checkpointer.wait(60.0)}
    assert (outcomes[1].error, outcomes[1].kept) == (None, True)
    assert "the agent refused Staged: slot 1: its description has changed" in (
        outcomes[2].error or ""
    )
    assert checkpointer.link.current is client
    assert "a new agent adopts" not in caplog.text
    assert job.save(3) is None
    job.assert_stored(root, 3)


def test_the_last_save_waits_for_a_slot_at_most_for_the_drain_timeout(
    make_job: Any, config: Config, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(
        config,
        busy="skip",
        drain_timeout_s=1.0,
        agent=msgspec.structs.replace(config.agent, commit_timeout_s=15.0),
    )
    job = make_job(config)
    first, second = (blocked_shard(root, n, 0, job.save_id(n)) for n in (1, 2))
    with first, second:
        for iteration in (1, 2):
            job.checkpointer.save(job.request(iteration))
            job.checkpointer.link.stager.wait()
        assert job.checkpointer.save(job.request(3)).refusal is not None
        report = job.checkpointer.write_last()
        outcomes = {outcome.iteration: outcome.error or "" for outcome in job.checkpointer.wait()}
    assert report.copies is None
    assert "no slot became free within 1 s" in outcomes[3]
    assert all("raise 'drain_timeout_s'" in outcomes[iteration] for iteration in (1, 2, 3))
    assert job.save(4) is None, "a save that is not the last one waits longer"


def test_a_state_that_all_ranks_skip_for_a_busy_one_is_saved_by_a_later_call(
    make_job: Any, config: Config, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank gets a slot each time; its earlier checkpoint stays in memory."""
    job = make_job(msgspec.structs.replace(config, busy="skip"))
    assert job.save(1) is None
    others = [1]
    monkeypatch.setattr(
        "megatron_flashckpt.save.checkpointer.reduce_int", lambda value, how: max(value, *others)
    )
    for _ in range(3):
        report = job.checkpointer.save(job.request(2))
        assert report.copies is None
        assert report.refusal is not None
        slab, offers = job.checkpointer.link.client().take()
        slab.close()
        assert [offer.iteration for offer in offers] == [1]
    others[:] = [0]
    assert job.save(2) is None
    job.assert_stored(root, 2)


@pytest.mark.parametrize("has_agent", [True, False])
def test_an_error_promises_a_late_write_only_if_an_agent_runs(
    make_job: Any, config: Config, caplog: pytest.LogCaptureFixture, *, has_agent: bool
) -> None:
    job = make_job(config)
    if has_agent:
        assert job.save(1) is None
    session, reports = session_of(job, config)
    reports.requested(2)
    reports.skipped(2, "no reason")
    assert not session.end()
    assert ("try to write it after this exit" in caplog.text) == has_agent
    assert "the last save, iteration 2, is not durable" in caplog.text


def test_the_last_error_of_a_job_says_how_long_host_memory_holds_the_save(
    make_job: Any, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(config)
    root = Path(job.checkpointer.root)
    assert job.save(1) is None
    (root / "iter_0000002" / file_names.shard_name(0, job.save_id(2))).mkdir(parents=True)
    session, reports = session_of(job, config)
    session.note_nodes("ab")
    reports.requested(2)
    job.checkpointer.save(job.request(2))
    (outcome,) = job.checkpointer.wait()
    reports.failed(outcome)
    assert not session.end()
    last = caplog.records[-1].getMessage()
    assert "; host memory of 2 nodes holds iteration 2 until " in last
    assert "remove the cause, and start the job again" in last


def test_a_rank_that_cannot_save_still_joins_the_collectives(
    make_job: Any, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`busy: skip` costs one collective; without this rank, the other ranks would hang in it."""
    job = make_job(msgspec.structs.replace(config, busy="skip"))
    reduced: list[tuple[int, str]] = []

    def reduce(value: int, how: str) -> int:
        reduced.append((value, how))
        return value

    monkeypatch.setattr("megatron_flashckpt.save.checkpointer.reduce_int", reduce)
    whole = job.side_state
    job.side_state = lambda: {"hook": object()}
    with pytest.raises(UnsupportedError):
        job.checkpointer.save(job.request(1))
    assert reduced == [(2, "max")]
    job.side_state = lambda: {"rate": 1 / 0}
    with pytest.raises(ZeroDivisionError):
        job.checkpointer.save(job.request(1))
    assert reduced == [(2, "max")] * 2
    job.side_state = whole
    assert job.save(1) is None, "a repeated request for this iteration is saved"


def test_the_agent_of_a_rank_that_cannot_save_notifies_the_other_nodes(
    make_job: Any, config: Config, root: Path
) -> None:
    """Without this end, other nodes would wait for this rank until `commit_timeout_s`."""
    job = make_job(config)
    assert job.save(1) is None
    whole, job.side_state = job.side_state, lambda: {"hook": object()}
    with pytest.raises(UnsupportedError):
        job.checkpointer.save(job.request(2))
    end = root / file_names.iteration_dir(2) / file_names.end_name(job.save_id(2))
    eventually("the end of the save", end.exists)
    assert "rank 0: UnsupportedError: " in decode_failure(end.read_bytes()).failed
    job.side_state = whole
    assert job.save(3) is None
