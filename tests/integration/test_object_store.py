"""A real job saves to a bucket, is killed, and resumes bit for bit from memory and from there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_flashckpt.catalog.listing import committed_iterations
from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.storage.object_store import ObjectStore
from tests.support.megatron_jobs import Result, await_no_agent, run_job, succeeded
from tests.support.trainer import eventually

LAYOUT = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer"]


def test_a_job_in_a_bucket_resumes_from_memory_and_from_storage(
    tmp_path: Path, s3_url: str
) -> None:
    def run(name: str, save: str, *more: str, **options: Any) -> Result:
        schedule = ["--train-iters", "6", "--save", save, "--load", save, "--save-interval", "3"]
        return succeeded(run_job(tmp_path, name, [*LAYOUT, *schedule, *more], ranks=2, **options))

    undisturbed = run("a", str(tmp_path / "A")).losses()
    killed = run("b", s3_url, max_restarts=1, env={"KILL": "1:5"})
    assert "iteration 3 was restored from memory" in killed.log
    await_no_agent(tmp_path)
    store = ObjectStore(s3_url)
    assert committed_iterations(store) == [3, 6]
    for iteration in (3, 6):
        assert verify(open_checkpoint(store, iteration)) == []
    by_profile = {
        "MSC_CONFIG": str(tmp_path / "msc.json"),
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",  # the profile counts
    }
    of_profile = another_name(s3_url, tmp_path / "msc.json")
    resumed = run("c", of_profile, "--ckpt-step", "3", nodes=2, env=by_profile)
    assert "iteration 3 was restored from storage" in resumed.log
    assert committed_iterations(store) == [3, 6], "two agents have met in the bucket alone"
    for losses in (killed.losses(1), resumed.losses()):
        assert losses == {iteration: undisturbed[iteration] for iteration in (4, 5, 6)}
    assert list(tmp_path.rglob("*:")) == [], "a URL is no local directory"
    agents = tmp_path / "run"
    eventually("the end of both agents", lambda: not list(agents.rglob("*.log")))


def another_name(url: str, config: Path) -> str:
    """Return the name of a profile of the Multi-Storage Client, which is not installed."""
    base, _, job = url.removeprefix("s3://").rpartition("/")
    options = {"base_path": base, "endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    provider = {"storage_provider": {"type": "s3", "options": options}}
    config.write_text(json.dumps({"profiles": {"mine": provider}}))
    return f"msc://mine/{job}"
