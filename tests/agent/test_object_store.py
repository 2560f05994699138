"""Agents that save to a bucket of a real S3 server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.catalog.listing import committed_iterations
from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.config import Retention
from megatron_flashckpt.file_format.file_names import ALIVE, alive_file, run_file
from megatron_flashckpt.file_format.shard_file import CHUNK_NBYTES
from megatron_flashckpt.sizing.store_requests import of_a_save
from megatron_flashckpt.storage.object_store import ObjectStore
from tests.agent.conftest import Node
from tests.support.agents import agent_here
from tests.support.object_server import EXPIRED, Proxy, ask_for_bucket
from tests.support.stored import assert_intact, names_in
from tests.support.trainer import PATIENCE_S, eventually, save_all


def test_an_agent_commits_to_a_bucket_and_removes_what_no_rule_keeps(
    node: Node, s3_url: str
) -> None:
    rules = Retention(latest=1)
    trainers = [
        node.trainer(s3_url, rank, 2, numel=2 * CHUNK_NBYTES // 6, retention=rules)
        for rank in range(2)
    ]
    trainers[1].join(trainers[0].open_run())
    for iteration in (1, 2, 3):
        assert save_all(trainers, iteration) == [None, None]
    store = ObjectStore(s3_url)
    eventually("the removals", lambda: committed_iterations(store) == [3])
    assert verify(open_checkpoint(store, 3)) == []
    assert store.get("latest_checkpointed_iteration.txt") == b"3"


# ---------------------------------------------------------------------- the bucket in mid-run


@pytest.fixture
def own_bucket(s3_proxy: Proxy) -> Iterator[str]:
    """Name of an empty bucket that the test may remove."""
    bucket = f"ckpt-{uuid.uuid4().hex}"
    ask_for_bucket("PUT", bucket)
    yield bucket
    ask_for_bucket("DELETE", bucket)


def test_saves_fail_while_the_bucket_is_gone_and_commit_when_it_is_back(
    node: Node, own_bucket: str, impatient: None
) -> None:
    """Somebody removes it, and makes it again, empty. Memory holds the checkpoints meanwhile."""
    url = f"s3://{own_bucket}/save"
    with agent_here(node, url):
        trainer = node.trainer(url)
        run = trainer.open_run()
        assert trainer.save(1).error is None
        ask_for_bucket("DELETE", own_bucket)
        error = trainer.save(2).error
        assert error is not None
        assert f"{url}/iter_0000002/" in error
        assert "the bucket does not exist: correct its name, or the endpoint, or create it" in error
        assert [offer.iteration for offer in trainer.take()] == [2, 1]
        ask_for_bucket("PUT", own_bucket)
        assert trainer.save(3).error is None
        assert_intact(url, 3, [trainer])
        own = [run_file(1), alive_file(run.name)]
        eventually("run and sign of life", lambda: set(own) <= set(names_in(url)))


def test_an_agent_reaches_the_store_as_the_job_that_it_serves(
    node: Node, s3_url: str, s3_proxy: Proxy, s3_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose credentials have expired is started again with new ones, and has its memory."""
    first = node.trainer(s3_url)
    run = first.open_run()
    assert first.keep(1).error is None
    first.hang_up()
    s3_proxy.fault_of = lambda method, path: EXPIRED
    anew = Proxy(s3_port)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{anew.port}")
        again = node.trainer(s3_url)
        assert again.client.agent_pid == first.client.agent_pid
        (offer,) = again.take()
        again.open_run(Save(1, offer.save_id), run.ancestors, wait_s=PATIENCE_S)
        assert again.save(2).error is None
        assert "this run has other credentials" in node.log(s3_url).read_text()
        again.hang_up(leave=True)
        eventually("the end of the agent", lambda: not node.agents())
        assert [name for name in names_in(s3_url) if name.startswith(ALIVE)] == []
    finally:
        anew.close()


def test_a_plan_counts_the_requests_of_a_save(node: Node, s3_url: str, s3_proxy: Proxy) -> None:
    def removals() -> int:
        """Return how often records of saves were removed, which is the end of a save's requests."""
        return sum("?delete" in path for _, path in s3_proxy.requests)

    trainer = node.trainer(s3_url)
    trainer.open_run()
    assert trainer.save(1).error is None  # finds no earlier checkpoint
    eventually("the removal", lambda: removals() == 1)
    before = len(s3_proxy.requests)
    assert trainer.save(2).error is None
    eventually("the removal", lambda: removals() == 2)
    asked = [
        (method, path)
        for method, path in s3_proxy.requests[before:]
        if not any(name in path for name in ("alive", "?delete"))
    ]
    writes = [pair for pair in asked if pair[0] in ("PUT", "POST") or "list-type" in pair[1]]
    plan = of_a_save(ranks=1, nodes=1, parts=1, waiting_s=0.0, longest_pause_s=5.0)
    assert 0.7 * plan.writes <= len(writes) <= 1.4 * plan.writes
    assert 0.7 * plan.reads <= len(asked) - len(writes) <= 1.6 * plan.reads
    trainer.hang_up(leave=True)
