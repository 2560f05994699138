"""Real training whose checkpoints are copied from simulated GPUs, one per local rank.

Three jobs of two ranks save after iterations 2, 4 and 6. The first is an ordinary CPU job. In the
second, copies run on the side stream of each rank's device while the next iteration computes. One
rank is killed in iteration 6, and both ranks restart from the memory of iteration 4. The third job
starts from a copy of the second job's directory as it was at iteration 4. A fourth job saves the
weights without the optimizer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, open_checkpoint
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.layout.piece import WEIGHT
from megatron_flashckpt.storage.posix_store import PosixStore
from tests.support.megatron_jobs import (
    Result,
    assemble,
    differing,
    run_job,
    succeeded,
    tensors,
    truncated_copy,
)

MODEL = ["--num-layers", "2", "--bf16", "--use-distributed-optimizer"]
SAVED = (2, 4, 6)


class Jobs:
    """The four jobs, each run once."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.cpu = self._run("cpu")
        self.restarted = self._run("restarted", GPU="1", KILL="1:6", max_restarts=1)
        truncated_copy(tmp_path / "restarted", tmp_path / "resumed", 4)
        self.resumed = self._run("resumed", GPU="1")
        self.weights = self._run("weights", "--no-save-optim", "--exit-interval", "4", GPU="1")

    def _run(self, name: str, *more: str, max_restarts: int = 0, **env: str) -> Result:
        save = str(self.tmp_path / name)
        arguments = [
            *(*MODEL, "--train-iters", "6", "--save-interval", "2"),
            *("--save", save, "--load", save, *more),
        ]
        return succeeded(
            run_job(self.tmp_path, name, arguments, ranks=2, max_restarts=max_restarts, env=env)
        )

    def stored(self, name: str, iteration: int) -> StoredCheckpoint:
        return open_checkpoint(PosixStore(self.tmp_path / name), iteration)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("gpu-ranks"))


@pytest.mark.parametrize("iteration", SAVED)
def test_a_gpu_checkpoint_equals_the_cpu_jobs_bit_for_bit(jobs: Jobs, iteration: int) -> None:
    assert verify(jobs.stored("restarted", iteration)) == []
    expected = tensors(jobs.tmp_path / "cpu", iteration)
    assert differing(expected, tensors(jobs.tmp_path / "restarted", iteration)) == []


def test_a_restart_from_memory_is_bit_exact(jobs: Jobs) -> None:
    assert "iteration 4 was restored from memory" in jobs.restarted.log
    expected, first = jobs.cpu.losses(), jobs.restarted.losses(attempt=0)
    for iteration in range(1, 6):
        assert first[iteration] == expected[iteration]
    again = jobs.restarted.losses(attempt=1)
    assert again == {5: expected[5], 6: expected[6]}


def test_a_resume_from_storage_is_bit_exact(jobs: Jobs) -> None:
    assert "iteration 4 was restored from storage" in jobs.resumed.log
    expected = jobs.cpu.losses()
    assert jobs.resumed.losses() == {5: expected[5], 6: expected[6]}
    assert verify(jobs.stored("resumed", 6)) == []
    last = tensors(jobs.tmp_path / "resumed", 6)
    assert differing(tensors(jobs.tmp_path / "cpu", 6), last) == []


def test_copies_were_under_way_when_the_next_step_was_due(jobs: Jobs) -> None:
    """If no copy were under way, this module would not test that the step waits for copies."""
    under_way = {
        (event["rank"], event["attempt"], event["iteration"])
        for event in jobs.restarted.named("change")
        if event["under_way"]
    }
    assert under_way == {(rank, 0, iteration) for rank in (0, 1) for iteration in (3, 5)}


def test_steps_wait_for_weights_that_are_saved_without_the_optimizer(jobs: Jobs) -> None:
    under_way = {
        event["rank"]
        for event in jobs.weights.named("change")
        if event["iteration"] == 3 and event["under_way"]
    }
    assert under_way == {0, 1}
    expected = {
        name: tensor
        for name, tensor in assemble(jobs.tmp_path / "cpu", 2).items()
        if name[0] == WEIGHT
    }
    saved = assemble(jobs.tmp_path / "weights", 2)
    assert saved.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(saved[name], expected[name])] == []


def test_our_threads_call_cuda_on_the_device_of_their_local_rank(jobs: Jobs) -> None:
    events = jobs.restarted.named("gpu", attempt=1) + jobs.resumed.named("gpu")
    assert sorted(event["rank"] for event in events) == [0, 0, 1, 1]  # from jobs without a kill
    for event in events:
        devices = event["devices"].items()
        ours = {
            thread: called_on for thread, called_on in devices if thread.startswith("flashckpt-")
        }
        names = ("flashckpt-prepare", "flashckpt-pin", "flashckpt-stage")
        assert ours == {name: [event["rank"]] for name in names}
        assert event["locked"] == [["flashckpt-pin", event["rank"]]]


def test_the_copy_thread_makes_all_copies(jobs: Jobs) -> None:
    for event in jobs.resumed.named("gpu"):
        makers = {thread for thread, count in event["copies"].items() if count}
        assert makers == {"flashckpt-stage"}


def test_saves_leave_cached_gpu_memory_to_the_next_step(jobs: Jobs) -> None:
    """Megatron 0.17.1 empties torch's cache before each save, and the next step allocates again."""
    # Megatron empties the cache once more, when it has warmed up its fused functions.
    assert [event["emptied"] for event in jobs.resumed.named("gpu")] == [1, 1]
