"""Reports of a real job on its saves: curves, traces, the history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_flashckpt.catalog.stored_checkpoint import open_checkpoint
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.histories import saves_in
from tests.support.megatron_jobs import Result, await_no_agent, run_job, succeeded

SCALARS = {
    f"checkpoint/{name}"
    for name in ("blocked_ms", "staged_s", "durable_s", "bytes", "gb_per_s", "failures_in_a_row")
}


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observability")


@pytest.fixture(scope="module")
def job(where: Path) -> Result:
    arguments = [
        *("--num-layers", "2", "--bf16", "--use-distributed-optimizer"),
        *("--train-iters", "5", "--save-interval", "2", "--save", str(where / "save")),
        *("--non-persistent-save-interval", "3"),
    ]
    env = {"SCALARS": "1", "FLASHCKPT_TRACE__DIRECTORY": "traces"}
    done = succeeded(run_job(where, "observed", arguments, ranks=2, env=env))
    await_no_agent(where)  # the agent completes its trace before it ends
    return done


def test_tensorboard_has_the_timings_of_saves_at_their_iterations(job: Result, where: Path) -> None:
    events = [
        scalar for scalar in job.named("tensorboard") if scalar["name"].startswith("checkpoint/")
    ]
    assert {event["rank"] for event in events} == {1}, "Megatron's writer is on the last rank"
    scalars = {(scalar["step"], scalar["name"]): scalar["value"] for scalar in events}
    for iteration in (2, 4, 5):
        assert {name for step, name in scalars if step == iteration} == SCALARS
        stored = open_checkpoint(PosixStore(where / "save"), iteration)
        nbytes = sum(shard.nbytes for shard in stored.manifest.shards)
        assert scalars[iteration, "checkpoint/bytes"] == nbytes
        blocked_s = scalars[iteration, "checkpoint/blocked_ms"] / 1000
        assert blocked_s > 0
        assert (
            scalars[iteration, "checkpoint/staged_s"] < scalars[iteration, "checkpoint/durable_s"]
        )
        assert scalars[iteration, "checkpoint/failures_in_a_row"] == 0
    assert {name for step, name in scalars if step == 3} == {"checkpoint/memory/blocked_ms"}


def test_weights_and_biases_gets_timings_at_increasing_steps(job: Result) -> None:
    events = [event for event in job.named("wandb") if event["name"].startswith("checkpoint/")]
    names = {event["name"] for event in events}
    assert names >= {"checkpoint/blocked_ms", "checkpoint/memory/blocked_ms"}
    steps = [event["step"] for event in job.named("wandb") if event["step"] is not None]
    assert steps == sorted(steps)


def test_blocked_covers_the_training_loops_whole_wait_for_a_save(job: Result, where: Path) -> None:
    """Megatron's timers synchronize GPU and ranks before and after `save_checkpoint`."""
    saves = saves_in(where / "save")
    assert [(past.iteration, past.error, past.world_size) for past in saves] == [
        (iteration, None, 2) for iteration in (2, 4, 5)
    ]
    for save in saves:
        assert 0 < save.cost.staged_s < save.cost.persisted_s
        assert save.cost.staged_s < save.cost.durable_s
    blocked_s = {save.iteration: save.cost.blocked_s for save in saves}
    for path in sorted((where / "save/traces").glob("*.json")):
        iteration = int(path.name.partition("-")[0][-1])
        if iteration == 5:  # Megatron makes the last save after its loop has ended
            continue
        events = [
            event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] != "M"
        ]
        for rank in (0, 1):
            spans = {event["name"]: event for event in events if event["pid"] == rank}
            loop, save = spans["save as the training loop sees it"], spans["save"]
            assert loop["ts"] <= save["ts"]
            assert loop["ts"] + loop["dur"] >= save["ts"] + save["dur"]
            if iteration in blocked_s:
                assert blocked_s[iteration] >= loop["dur"] / 1e6 - 1e-6
    # The node may lack the memory for a second slab: the save after training uses the first one.
    assert sorted(event["rank"] for event in job.named("slab")) == [0, 1]
