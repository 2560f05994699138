"""`Checkpointer` with a real agent, on several local ranks of a simulated GPU node."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.file_format import file_names
from megatron_flashckpt.memory import pinned_slab
from megatron_flashckpt.memory import slab as slab_module
from megatron_flashckpt.memory.pinned_slab import unlock_closed
from megatron_flashckpt.memory.slot import SlotState
from megatron_flashckpt.save import node_link
from megatron_flashckpt.tracing import LOOP, SAVE, Recorder
from tests.agent.conftest import Node
from tests.simulated_gpu import Node as GpuNode
from tests.simulated_gpu import simulated_gpus
from tests.support.processes import times_mapped
from tests.support.rank_job import Job
from tests.support.trainer import PATIENCE_S, eventually


@pytest.fixture
def gpus() -> Iterator[GpuNode]:
    with simulated_gpus(8, memory_nbytes=256 << 20) as made:
        yield made


class GpuJob(Job):
    """A rank with tensors on the device of its local rank."""

    def __init__(self, local_rank: int, *args: Any) -> None:
        torch.cuda.set_device(local_rank)  # as Megatron does, on the training thread
        super().__init__(*args)
        self.tensors = [tensor.cuda() for tensor in self.tensors]

    @property
    def values(self) -> list[torch.Tensor]:
        return [tensor.cpu() for tensor in self.tensors]

    def step(self) -> None:
        self.checkpointer.hook._wait()
        for tensor in self.tensors:
            tensor.add_(1.0)


@pytest.fixture
def make(root: Path, node: Node, monkeypatch: pytest.MonkeyPatch, gpus: GpuNode) -> Iterator[Any]:
    made: list[GpuJob] = []

    def job(local_rank: int, **settings: Any) -> GpuJob:
        config = msgspec.structs.replace(node.config(), **settings)
        made.append(GpuJob(local_rank, root, config, monkeypatch))
        return made[-1]

    yield job
    gpus.refusals.clear()
    for created in made:
        created.checkpointer.close(leave=False)


def test_a_restarted_rank_reuses_its_memory(make: Any, root: Path, gpus: GpuNode) -> None:
    first = make(5)
    first.checkpointer.link.prepare(25_000_000)
    assert first.save(1) is None
    first.checkpointer.close(leave=False)
    gpus.runtime.locked.clear()  # the kernel unlocks the memory of an ended process
    gpus.runtime.registered_by.clear()
    again = make(5)
    may_lock = threading.Event()
    gpus.refusals["cudaHostRegister"] = may_lock.wait
    slab, (offer, *_) = again.checkpointer.link.take_slab()
    assert offer.iteration == 1
    assert gpus.runtime.registered_by == [], "a load does not wait for page-locking"
    may_lock.set()
    again.checkpointer.link.wait_for_device_work()
    assert again.checkpointer.link.stager.is_pinned(slab.geometry.nbytes), "a load copies from it"
    again.checkpointer.link.prepare(None)
    eventually("all prepared", lambda: not again.checkpointer.link.is_preparing)
    again.checkpointer.link.wait_for_device_work()
    assert gpus.runtime.registered_by == [(slab.geometry.nbytes, "flashckpt-pin", 5)]
    again.step()
    assert again.save(2) is None
    again.assert_stored(root, 2)


def test_a_restarted_rank_locks_its_memory_without_pauses(
    make: Any, gpus: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses are for training, which begins after the load that copies from locked memory."""
    first = make(5)
    assert first.save(1) is None
    first.checkpointer.close(leave=False)
    gpus.runtime.locked.clear()  # the kernel unlocks the memory of an ended process
    monkeypatch.setattr(pinned_slab, "CHUNK_NBYTES", 1 << 20)
    monkeypatch.setattr(pinned_slab, "_PAUSE_PER_CALL", 1e9)
    again = make(5)
    slab, _ = again.checkpointer.link.take_slab()
    stager = again.checkpointer.link.stager
    eventually("the slab is locked", lambda: stager.is_pinned(slab.geometry.nbytes))


def test_a_job_with_graphs_waits_until_its_slab_is_locked_but_not_for_a_hanging_driver(
    make: Any,
    gpus: GpuNode,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = make(5)
    may_lock = threading.Event()
    gpus.refusals["cudaHostRegister"] = may_lock.wait
    link = job.checkpointer.link
    link.prepare(25_000_000)
    waiting = threading.Thread(target=link.wait_for_device_work)
    waiting.start()
    eventually("the slab is made", lambda: not link.is_preparing)
    waiting.join(0.2)
    assert waiting.is_alive()
    monkeypatch.setattr(node_link, "_PINNING_S", 0.1)
    link.wait_for_device_work()
    may_lock.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert len(gpus.runtime.registered_by) == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("rank 0: checkpoint slots are still being page-locked after 0 s")


def test_a_save_that_the_loop_waits_for_does_not_wait_for_the_loop(make: Any) -> None:
    job = make(5)
    loop = Recorder(LOOP)
    with loop.recording(), loop.phase(LOOP):
        report = job.checkpointer.save(job.request(1, must_wait=True))
        assert [outcome.error for outcome in job.checkpointer.wait()] == [None]
        assert job.checkpointer.save(job.request(2)).recorder is loop, "others are timed by it"
    assert report.recorder.blocked_s < loop.blocked_s
    assert report.recorder.call == SAVE
    assert [outcome.error for outcome in job.checkpointer.wait()] == [None]


def test_a_slot_whose_staged_message_failed_is_marked_failed(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks get the error of this save, so no later agent may commit the save."""
    job = make(5)
    assert job.save(1) is None

    def refuse(*_: Any) -> None:
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(job.checkpointer.link.client(), "staged", refuse)
        assert job.save(2) == "not handed to the agent (ValueError: no)"
    headers = [slot.header for slot in job.checkpointer.link._slab.slots]
    assert {header.iteration: header.state for header in headers}[2] == SlotState.FAILED


def test_the_next_agent_adopts_a_save_that_is_still_copied(
    make: Any, root: Path, gpus: GpuNode
) -> None:
    """If the next agent got the slab earlier, it would treat the slot as torn by a crash."""
    job = make(5)
    assert job.save(1) is None
    link = job.checkpointer.link
    with gpus.devices[5].held():
        job.checkpointer.save(job.request(2))
        os.kill(link.client().agent_pid, signal.SIGKILL)
        eventually(
            "the loss of the agent is noticed",
            lambda: job.checkpointer.saves.poll() or link.current is None,
        )
        assert not link.wait_prepared(1.0)
        assert link.is_preparing, "the next agent waits for the copies"
    (outcome,) = job.checkpointer.wait()
    assert (outcome.iteration, outcome.error) == (2, None)
    job.assert_stored(root, 2)


def test_a_blocking_save_returns_after_all_copies(make: Any, root: Path, gpus: GpuNode) -> None:
    """Such saves serve jobs whose tensors change outside of the optimizer step."""
    gpus.d2h_bytes_per_s = 200e6
    job = make(5)
    job.checkpointer.link.prepare(25_000_000)
    job.checkpointer.link.wait_for_device_work()
    values = job.values
    job.checkpointer.save(job.request(1, blocking=True))
    assert gpus.devices[5].to_host.queued_nbytes == 0
    for tensor in job.tensors:
        tensor.fill_(-1.0)
    assert job.checkpointer.wait()[0].error is None
    (shard,) = (root / file_names.iteration_dir(1)).glob("*.safetensors")
    data = shard.read_bytes()
    assert all(value.numpy().tobytes() in data for value in values)


def mapped_by_earlier_tests() -> int:
    """Return how many slabs stay mapped in this process, after closed ones have been freed."""
    unlock_closed()
    return times_mapped("0")


def test_memory_of_a_closed_run_is_freed_for_the_next_one(
    make: Any, root: Path, gpus: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first slab stays page-locked, so that an ordinary exit does not wait for unlocking."""
    before = mapped_by_earlier_tests()
    first = make(5)
    assert first.save(1) is None
    nbytes = first.checkpointer.link._slab.geometry.nbytes
    first.checkpointer.close()
    assert times_mapped("0") == before + 1

    def left() -> int:
        return int(nbytes * (1.5 + before - times_mapped("0")))

    monkeypatch.setattr(slab_module, "available_nbytes", left)
    again = make(5)
    assert again.save(2) is None
    again.assert_stored(root, 2)
    again.checkpointer.link.wait_for_device_work()
    assert times_mapped("0") - before == len(gpus.runtime.locked) == 1


def test_a_copy_that_fails_after_the_timeout_does_not_stop_later_saves(
    make: Any, root: Path, gpus: GpuNode
) -> None:
    job = make(5)
    assert job.save(1) is None
    awaited = threading.Event()

    def fail_late() -> None:
        awaited.wait()
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    gpus.refusals["Event.synchronize"] = fail_late
    job.checkpointer.save(job.request(2))
    (late,) = job.checkpointer.wait(timeout_s=0.05)
    assert "not committed within 0 s" in late.error
    awaited.set()
    job.checkpointer.link.stager.wait()
    gpus.refusals.clear()
    assert job.checkpointer.saves.poll() == []
    assert job.save(3) is None
    job.assert_stored(root, 3)


def test_releases_of_torch_without_a_class_for_errors_of_cuda_report_them(
    make: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(5)

    def fail_with(error: Exception) -> None:
        def fail(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(job.checkpointer.model_state, "owned", fail)

    monkeypatch.delattr(torch, "AcceleratorError")
    monkeypatch.delattr(torch, "OutOfMemoryError")
    fail_with(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert "rank 0: not staged: CUDA error: an illegal memory access" in (job.save(1) or "")
    for error in (UnsupportedError("a flag"), RuntimeError("shapes differ")):
        fail_with(error)
        with pytest.raises(type(error), match=str(error)):
            job.checkpointer.save(job.request(2))


def test_a_rank_with_a_hung_gpu_ends_after_its_drain_timeout(make: Any, gpus: GpuNode) -> None:
    job = make(5)
    assert job.save(1) is None
    gpus.devices[5].running.clear()
    job.checkpointer.save(job.request(2))
    (late,) = job.checkpointer.wait(timeout_s=0.05)
    assert late.error == (
        "not committed within 0 s: rank 0 has not copied its part to host memory; look at its GPU "
        "and its agent, or raise 'drain_timeout_s' to wait longer"
    )
    assert late.failed_ranks == (0,)
    closing = threading.Thread(target=job.checkpointer.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    was_closed = not closing.is_alive()
    gpus.devices[5].running.set()
    assert was_closed
