"""Rank that saves until the event of the variable SCENARIO ends it.

All elements of a save equal the number of its iteration.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from pathlib import Path
from unittest import mock

import torch

from megatron_flashckpt.config import AgentConfig
from megatron_flashckpt.file_format.commit_record import Coordinates
from megatron_flashckpt.megatron_lm import parallel
from megatron_flashckpt.memory.slot import SlotState
from tests.support.trainer import eventually
from tools.gpu_check import machine
from tools.gpu_check.rank import Node, Rank, request
from tools.gpu_check.report import Report

TENSORS = 8
#: Space in a slot for state in addition to the tensors.
SIDE_NBYTES = 1 << 20
#: Duration of a kernel that represents an endless one.
BUSY_S = 15.0
#: Bytes per second of slow copies on the simulated node.
_SLOW = 4e6


def run(report: Report) -> None:
    """Run the scenario; the figure "the end begins" is the time from which it must end."""
    with mock.patch.object(parallel, "coordinates", Coordinates):
        _run(report)


def _run(report: Report) -> None:
    numel = int(float(os.environ.get("GIB", "1")) * 2**30) // 4 // TENSORS
    numel = machine.pick(numel, (1 << 18) // 4)
    node = Node(Path(os.environ["WHERE"]))
    tensors = [torch.ones(numel, device="cuda") for _ in range(TENSORS)]
    rank = node.rank(tensors, agent=AgentConfig(grace_s=60.0, persist_on_leave=False))
    scenario = os.environ["SCENARIO"]
    if scenario == "control":
        keep_busy_for_ever()
        report.figure("the end begins", time.monotonic(), "s")
        return
    if scenario != "resume":
        rank.checkpointer.link.prepare(rank.nbytes + SIDE_NBYTES)
        rank.checkpointer.link.wait_for_device_work()
        keep(rank, 1)
        eventually("its outcome", lambda: rank.checkpointer.saves.poll(0.1))
    {
        "broken before a save": break_before_a_save,
        "broken during copies": break_during_copies,
        "broken at exit": break_at_exit,
        "busy for ever": be_busy_for_ever,
        "SIGKILL": be_killed,
        "resume": resume,
    }[scenario](report, rank)


def keep(rank: Rank, iteration: int) -> None:
    """Start a memory-only save of tensors that are filled with `iteration`."""
    rank.before_step()
    for tensor in rank.tensors:
        tensor.fill_(float(iteration))
    rank.checkpointer.save(request(iteration, memory_only=True))


def break_gpu() -> None:
    """Make a kernel access invalid memory; later calls report the error."""
    if machine.simulated_node is not None:
        machine.simulated_node.current_device().fail("an illegal memory access was encountered")
        return
    storage = torch._C._construct_storage_from_data_pointer(
        0x1000, torch.device("cuda", torch.cuda.current_device()), 4096
    )
    torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (4096,), (1,)).fill_(1)


def keep_busy_for_ever() -> None:
    """Queue a kernel that runs longer than any wait."""
    if machine.simulated_node is not None:
        machine.simulated_node.current_device().running.clear()
    else:
        machine.keep_busy(BUSY_S)


def await_the_error() -> str:
    """Synchronize as training does next; return the error."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def end_after_a_crash(report: Report, rank: Rank) -> None:
    """Exit as a process does after an exception of training."""
    rank.checkpointer.saves.poll()
    started = time.monotonic()
    rank.checkpointer.abandon()
    report.figure("abandoned in", time.monotonic() - started, "s")


def break_before_a_save(report: Report, rank: Rank) -> None:
    break_gpu()
    error = await_the_error()
    report.must("the GPU is broken before a save", "CUDA error" in error, error[:300])
    report.figure("the end begins", time.monotonic(), "s")
    try:
        rank.checkpointer.save(request(2, memory_only=True))
    except RuntimeError as failure:
        report.must("a save on a broken GPU raises nothing", False, str(failure)[:300])
    rank.checkpointer.link.stager.wait(5.0)
    errors = [outcome.error or "" for outcome in rank.checkpointer.saves.poll(0.1)]
    report.must(
        "a save on a broken GPU fails by name",
        any("CUDA" in text for text in errors),
        "; ".join(errors)[:300],
    )
    end_after_a_crash(report, rank)


def break_during_copies(report: Report, rank: Rank) -> None:
    save_slowly(rank, 2)
    report.note("the GPU breaks while a save is being copied", yes_or_no(rank))
    break_gpu()
    report.figure("the end begins", time.monotonic(), "s")
    error = await_the_error()
    report.must("training meets the GPU's error itself", "CUDA error" in error, error[:300])
    end_after_a_crash(report, rank)


def break_at_exit(report: Report, rank: Rank) -> None:
    rank.before_step()
    for tensor in rank.tensors:
        tensor.fill_(2.0)
    rank.save(2)
    rank.checkpointer.link.stager.wait()
    break_gpu()
    await_the_error()
    report.figure("the end begins", time.monotonic(), "s")
    errors = rank.wait()
    report.must("a save that was staged becomes durable", errors == [], "; ".join(errors))
    rank.close()


def be_busy_for_ever(report: Report, rank: Rank) -> None:
    rank.before_step()
    keep_busy_for_ever()
    rank.checkpointer.save(request(2, memory_only=True))
    report.figure("the end begins", time.monotonic(), "s")
    end_after_a_crash(report, rank)


def save_slowly(rank: Rank, iteration: int) -> None:
    """Start a save; return when its first bytes have arrived, but not the last ones."""
    if machine.simulated_node is not None:
        machine.simulated_node.d2h_bytes_per_s = _SLOW
    keep(rank, iteration)
    slab = rank.checkpointer.link._slab
    assert slab is not None
    (slot,) = [entry for entry in slab.slots if entry.header.iteration == iteration]

    def has_begun() -> bool:
        begin = slot.data_offset
        (value,) = struct.unpack("<f", slab.memory[begin : begin + 4])
        return bool(value == iteration)

    eventually("the first bytes of the save", has_begun)


def yes_or_no(rank: Rank) -> str:
    return "yes" if machine.is_copying(rank.checkpointer.link.stager) else "no"


def be_killed(report: Report, rank: Rank) -> None:
    save_slowly(rank, 2)
    report.note("SIGKILL comes while a save is being copied", yes_or_no(rank))
    report.figure("the end begins", time.monotonic(), "s")
    os.kill(os.getpid(), signal.SIGKILL)


def resume(report: Report, rank: Rank) -> None:
    started = time.monotonic()
    slab, offers = rank.checkpointer.link.take_slab()
    report.figure("memory taken in", time.monotonic() - started, "s")
    iterations = [offer.iteration for offer in offers]
    report.must(
        "the next start finds the older save, and no torn one", iterations == [1], f"{iterations}"
    )
    assert slab is not None
    states = sorted(SlotState(slot.header.state).name for slot in slab.slots)
    report.must("the slot of the torn save is empty", "EMPTY" in states, ", ".join(states))
    rank.checkpointer.link.resume_from(offers[0].save_id if offers else None, 1)
    keep(rank, 3)
    rank.checkpointer.link.stager.wait()
    eventually("its outcome", lambda: rank.checkpointer.saves.poll(0.1))
    report.figure("the end begins", time.monotonic(), "s")
    rank.close()
