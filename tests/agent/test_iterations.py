"""Iterations between saves: a rank asks its agent only if the answer may have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_flashckpt.agent.client import AgentClient
from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.memory.slab import Signals
from megatron_flashckpt.save import agent_watch
from tests.agent.conftest import Node
from tests.support.rank_job import Job
from tests.support.trainer import blocked_shard, eventually, new_save_id

ITERATIONS = 100


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the requests that this process has sent to agents."""
    sent: list[str] = []
    ask = AgentClient._ask

    def noted(client: AgentClient, request: Any, *more: Any) -> Any:
        sent.append(type(request).__name__)
        return ask(client, request, *more)

    monkeypatch.setattr(AgentClient, "_ask", noted)
    return sent


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a machine that gives the agent no core from counting as a stopped agent."""
    monkeypatch.setattr(agent_watch, "_SILENT_S", 600.0)


@pytest.fixture
def job(node: Node, make_job: Any) -> Any:
    return make_job(node.config())


def iterate(job: Job) -> list[Outcome]:
    """Poll once, as an iteration of the training loop does."""
    return job.checkpointer.saves.poll()


def counters(job: Job) -> tuple[AgentClient, Signals]:
    shared = job.checkpointer.link.shared
    assert shared is not None
    return shared[0], shared[1].signals


def test_an_iteration_sends_no_request_while_the_agent_has_nothing_new(
    node: Node, make_job: Any, root: Path, requests: list[str]
) -> None:
    # Only here: on a busy machine a notice would come before the result that others wait for.
    job = make_job(node.config(slow_save_s=0.2))
    assert job.save(1) is None
    assert iterate(job) == []
    requests.clear()
    assert [iterate(job) for _ in range(ITERATIONS)] == [[]] * ITERATIONS
    assert requests == []
    _, signals = counters(job)
    with blocked_shard(root, 2, 0, job.save_id(2)):
        former = signals.news
        job.stage(2)
        eventually("the notice of a slow save", lambda: signals.news > former)
        assert iterate(job) == []
        requests.clear()
        assert [iterate(job) for _ in range(ITERATIONS)] == [[]] * ITERATIONS
        assert requests == [], "the save is pending, and nothing about it has changed"


def test_a_result_is_reported_in_the_next_iteration(job: Job, requests: list[str]) -> None:
    for iteration in range(1, 6):
        job.stage(iteration)
        _, signals = counters(job)
        former = signals.news
        if not (outcomes := iterate(job)):
            eventually("news", lambda: signals.news > former)  # noqa: B023, called at once
            outcomes = iterate(job)
        assert [outcome.iteration for outcome in outcomes] == [iteration]
        assert requests.count("Poll") <= 3, "one after the hand-over, one or two for the result"
        requests.clear()


def test_a_rank_asks_until_the_agent_owes_all_saves_that_it_was_handed(
    job: Job, requests: list[str]
) -> None:
    """The result is gone before the copy thread has noted that the agent has the save."""
    assert job.save(1) is None
    iterate(job)
    client, _ = counters(job)
    saves = job.checkpointer.saves
    job.stage(2)
    saves._handed_over.clear()
    eventually("the result", lambda: client.poll(0.1).finished)
    assert iterate(job) == []
    requests.clear()
    assert iterate(job) == []
    assert requests == []
    saves.handed_over(next(iter(saves._open)))
    (outcome,) = iterate(job)
    assert (outcome.iteration, outcome.error) == (2, None)


def test_a_save_that_its_trainer_did_not_stage_is_news_when_it_ends(node: Node, root: Path) -> None:
    """The trainer has reconnected: it gets no result, and finds the save in storage."""
    trainer = node.trainer(root)
    save_id = new_save_id()
    with blocked_shard(root, 1, 0, save_id) as unblock:
        trainer.stage(1, save_id)
        trainer.find_agent()
        assert trainer.slab is not None
        assert trainer.client.poll().pending == 1
        former = trainer.slab.signals.news
        unblock()
        eventually("news", lambda: trainer.slab is not None and trainer.slab.signals.news > former)
    answer = trainer.client.poll()
    assert (answer.finished, answer.pending) == ((), 0)
