"""Training time lost to a save while every core is busy."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.compare.job import Job, slowest
from benchmarks.systems import System

#: Steps without a save, before and after each measured save.
_STEPS_BEFORE, _STEPS_AFTER = 5, 3
_LONGEST_SAVE_S = 60.0


class Training:
    """Steps that keep one core per rank busy, the most that a rank's Python thread can do."""

    def __init__(self, step_s: float) -> None:
        self._matrix = torch.randn(256, 256)
        self._products = 1
        started = time.perf_counter()
        for _ in range(50):
            self._multiply()
        self._products = max(1, int(slowest(step_s * 50 / (time.perf_counter() - started))))

    def _multiply(self) -> None:
        for _ in range(self._products):
            self._matrix @ self._matrix

    def step(self, system: System | None = None, saved: int = 0) -> tuple[float, float]:
        """Compute, wait until `system` allows the tensors to change, and wait for the other ranks.

        Returns the seconds of the step, and the seconds that it waited for `system`.
        """
        started = time.perf_counter()
        self._multiply()
        waiting = time.perf_counter()
        if system is not None:
            system.settle(saved)
        waited = time.perf_counter() - waiting
        slowest(0.0)
        return time.perf_counter() - started, waited


def training(job: Job, rounds: int) -> None:
    """Measure the time that steps lose during a save, with all cores busy."""
    training = Training(job.size.step_ms / 1000)
    training.step()
    for _, name in job.interleaved(rounds):
        if job.systems[name].background:
            with job.reported(name, "training"):
                _one_save_in_training(job, name, training)


def _one_save_in_training(job: Job, name: str, training: Training) -> None:
    system = job.systems[name]
    usual = [training.step()[0] for _ in range(_STEPS_BEFORE)]
    job.step += 1
    job.state.tag(job.step)
    dist.barrier()
    started = time.perf_counter()
    system.save(job.step, job.state)
    blocked = time.perf_counter() - started
    under_way = []
    complete = False
    while not complete and time.perf_counter() - started < _LONGEST_SAVE_S:
        took, waited = training.step(system, job.step)
        polling = time.perf_counter()
        done = system.poll(job.step)
        blocked += waited
        under_way.append(took - waited + time.perf_counter() - polling)
        complete = slowest(float(not done)) == 0
    usual += [training.step()[0] for _ in range(_STEPS_AFTER)]
    system.wait(job.step)
    usual_s = statistics.median(usual)
    slowed = sum(took - usual_s for took in under_way)
    job.note(
        name,
        step_s=usual_s,
        steps_under_way=len(under_way),
        training_blocked_s=slowest(blocked),
        training_slowed_s=slowest(slowed),
        training_lost_s=slowest(blocked + slowed),
    )
    system.prune(job.step)
